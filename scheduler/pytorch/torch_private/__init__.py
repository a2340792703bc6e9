"""The private names of torch that the package uses, each with what is expected of it.

No other module names a private part of torch, so that a new version breaks here or nowhere;
`tests/pytorch/torch_private` says what is expected of each name. What versions of torch do
differently is found out by trying it, not by comparing versions.
"""
