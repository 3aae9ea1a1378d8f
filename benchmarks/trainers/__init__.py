"""Real trainers on packprep's rows: NAME.py checks one, in an environment of NAME.txt; `nox -s
'trainers(NAME)'` does both.

By hand, in such an environment and in benchmarks/: python -m trainers.NAME
"""
