"""Bytes in motion: carries out a plan in a staging folder and publishes it by one rename. Decides nothing."""
