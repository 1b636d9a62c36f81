"""Nodes on Microsoft Azure."""
