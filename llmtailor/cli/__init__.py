"""The command line: reads options, prints results. One command per file."""
