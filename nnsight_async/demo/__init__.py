"""A chat with a small model that prints, beside each token, what the model would have said after a middle layer."""

from __future__ import annotations
