"""Configuration: TOML and `section.key=value` in, one frozen and checked `Config` out. Imports no torch.

schema   every key, its default and meaning        model     those of [model]; section what all sections share
presets  published shapes
load     files and overrides -> Config -> TOML     problems  what a reader cannot accept, in words
check    values that do not go together            compare   two configurations of one run folder
reference  the list of keys for --help and docs/reference/config.md
"""
