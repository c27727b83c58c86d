"""The command line: words in, words out. One command per file."""
