"""Shares and repeats, kept to the document by a whole build: sources of very different documents, in every kind of file."""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from packprep.building.status import read_plan
from packprep.corpus.reading import EMPTY
from packprep.dataset import open_dataset
from packprep.inspection.summary import describe_build, describe_dataset
from tests import made
from tests.command_line import run as packprep
from tests.reference import chance
