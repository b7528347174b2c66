"""Local steps: workers train alone and synchronize every `period` steps."""
