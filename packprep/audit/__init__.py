"""Audit packed datasets: read what any tool wrote, and count what is wrong with it.

```
readers/   a path → PackedData, whose batches are PackedRows: the only code that knows tools' formats
rows.py    the model of rows that all readers yield
```
"""
