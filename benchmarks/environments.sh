#!/bin/sh
# Make the environments of the peers: benchmarks/environments.sh FOLDER [PYTHON]
# Prints what to give to `table.py --peers-python`. Some 5 GB of disk.
set -eu
folder=${1:?a folder for the environments}
python=${2:-python3.11}
here=$(cd "$(dirname "$0")" && pwd)
for name in peers dolma streaming t5; do
    "$python" -m venv "$folder/$name" >&2
    "$folder/$name/bin/python" -m pip install --quiet --requirement "$here/requirements-$name.txt" >&2
done
"$folder/peers/bin/python" -m pip install --quiet --no-deps 'axolotl>=0.19,<0.20' >&2
for name in peers dolma streaming t5; do echo "$folder/$name/bin/python"; done
