"""A checkpoint as data: index, train state, optimizer layout, and the pieces that files consist of.

Pure: no file is opened here.
"""
