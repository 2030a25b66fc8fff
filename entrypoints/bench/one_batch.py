"""Placeholder."""
import argparse


def configure(parser: argparse.ArgumentParser) -> None: ...
