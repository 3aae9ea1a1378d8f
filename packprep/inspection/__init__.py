"""What a dataset looks like, for the people who train on it.

```
manifest ─► summary       totals, utilisation, mixes, lengths
shard ─┬─► row            one row: its segments as text, the loss marked under each token; one of them whole, and the
       │                  document's tokens that it was made of
       ├─► document       where a document went, or why it did not; how the first one was read
       ├─► search         which rows hold a text
       ├─► difference     what two datasets do not have alike
       └─► report         all of it as one HTML file, with rows to page through
manifest, plan ─► card    what a dataset was made from, as a data card
```
Each describes, in plain values, and puts that on a page, in a terminal or off it; the report makes
HTML of it. `text` makes text of token ids, and of that lines with their marks.
"""
