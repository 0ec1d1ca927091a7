"""One job: electing the head, meeting, supervising the nodes, ending together."""
