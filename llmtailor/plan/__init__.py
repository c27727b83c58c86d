"""Decisions about bytes. Everything here is pure: no file is opened."""
