"""What a stock resume reads, field by field, as data.

`model` has the form of the tables and the checks that they drive. The tables say of every field what it may hold, who
reads it and what stock does where it is off. docs/findings.md is made from them, and so are the damages of
tests/verify/test_fields.py.
"""
