"""Recompute every promise of a dataset; say what fails and where."""

from packprep.verification.dataset import print_report, verify_dataset

__all__ = ["print_report", "verify_dataset"]
