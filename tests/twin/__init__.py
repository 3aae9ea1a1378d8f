"""Slow, obvious twins of the compiled kernels, written from the design's text. They share no code
with packprep."""
