"""What is computed in C++: sources, their compilation at first use, and the face of those that a round is made of."""
