"""mless as a model of lm-evaluation-harness and as a model provider of Inspect.

Each module here needs the package that it is named after, which mless does not install by itself; `filling` is what they share.
"""
