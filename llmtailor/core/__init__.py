"""The vocabulary: frozen dataclasses over the standard library, importing nothing else of ours."""
