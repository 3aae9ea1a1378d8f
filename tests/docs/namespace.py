"""One page's Python: blocks come as lines of JSON on stdin, run in one namespace, and what each
came to goes out as one.

A file of its own, so that processes which a block starts can import what they were started from.
"""

import contextlib
import io
import json
import linecache
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # what libraries print past sys.stdout goes to stderr, and does not mix with answers
    os.dup2(2, 1)
    # packprep of PYTHONPATH, then the page's folder; not that of this file
    sys.path[:2] = [sys.path[1], ""]
    names: dict[str, object] = {"__name__": "__main__"}
    for line in sys.stdin:
        where, text = json.loads(line)
        linecache.cache[where] = (len(text), None, text.splitlines(keepends=True), where)
        out, error = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(text, where, "exec"), names)
            except BaseException:
                error = traceback.format_exc()
        answers.write(json.dumps([out.getvalue(), error]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
