"""The module tree of a model as data, and the paths that code is written against."""
