"""Findings, tables and pages as text, markdown, JSON, SARIF and HTML. Computes nothing."""
