"""Alert rules and a board for Prometheus and Grafana, made from the declared metrics."""
