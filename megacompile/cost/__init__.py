"""Predicts a schedule's time and memory on a machine."""
