"""Recompute every promise of a dataset; say what fails and where."""

from packprep.verification.dataset import print_report, verify_dataset
from packprep.verification.promises import PROMISES

__all__ = ["PROMISES", "print_report", "verify_dataset"]
