"""Steps before a rank starts: packages, images, set-up commands, rendezvous."""
