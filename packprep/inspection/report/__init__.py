"""One self-contained HTML file of a dataset, for eyes and for showing around.

```
manifest ─► totals, ledger, mix ───────────────┐
shards  ─┬► figures ─► charts ─────────────────┼─► page ─► FILE, whole or not at all
         └► rows that are chosen ─► sample ────┤
faults, from the verification that the caller made
```
"""

from packprep.inspection.report.writing import check_file, shards_shown, write_report

__all__ = ["check_file", "shards_shown", "write_report"]
