"""What the tests share: small models, the one-process reference, and a pool of gloo workers."""
