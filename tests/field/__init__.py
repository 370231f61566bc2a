"""Failures that people reported of systems like this one, each reduced to its trigger and to what a user is owed."""
