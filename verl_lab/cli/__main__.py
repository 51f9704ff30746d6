"""`python -m verl_lab.cli`: the same as `verl-lab`."""

from verl_lab.cli.app import main

main()
