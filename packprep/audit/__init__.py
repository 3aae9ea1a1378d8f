"""Audit packed datasets: read what any tool wrote, and count what is wrong with it.

```
readers/             path → PackedData, whose batches are PackedRows (rows.py): knows tools' formats
documents.py         rows → documents, padding and figures, by kernels
checks.py            batches → counts and first places of each kind of kinds.py
copies.py            hashes → copies, exactly and in bounded memory
markup.py            a chat template → searches for trained prompts and empty reasoning
source_documents.py  a source → its documents that are missing or cut
report.py, html.py   all of this for one path, as values, text and HTML
```
"""
