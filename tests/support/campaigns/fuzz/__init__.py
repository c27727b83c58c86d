"""A fuzzer of the parsers: `__main__` is the command, and says how it goes about it."""

from campaigns.fuzz.loop import fuzz, make_sound, try_input
from campaigns.fuzz.mutations import mutate_bytes
from campaigns.fuzz.parsers import PARSERS, Parser, mutate_content

__all__ = ["PARSERS", "Parser", "fuzz", "make_sound", "mutate_bytes", "mutate_content", "try_input"]
