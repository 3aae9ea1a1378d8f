"""Recompute every promise of a dataset; say what fails and where."""

from packprep.verification.verify import PROMISES, print_report, verify_dataset

__all__ = ["PROMISES", "print_report", "verify_dataset"]
