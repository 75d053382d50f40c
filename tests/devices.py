"""The devices that a test is for, each with a case of its own."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
