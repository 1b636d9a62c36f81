"""What the providers of clouds share: calls of REST interfaces, the start script of a machine, settings, shapes and prices."""
