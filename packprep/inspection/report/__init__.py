"""One self-contained HTML file of a dataset, for eyes and for showing around.

```
manifest ─► totals, ledger, mix ───────────────┐
shards  ─┬► figures ─► distributions ─► charts ┼─► page ─► FILE, whole or not at all
         └► choice ─► sample ──────────────────┤
faults, from the verification that the caller made
```
"""

from packprep.inspection.report.writing import check_place, shards_shown, write_report

__all__ = ["check_place", "shards_shown", "write_report"]
