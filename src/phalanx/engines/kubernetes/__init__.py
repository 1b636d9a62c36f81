"""Kubernetes: supervisors in pods of one namespace, with the rights of one Role and nothing installed in the cluster."""
