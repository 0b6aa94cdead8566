"""No paper: the reduced CIFAR-10 set-up that the tables of rank-1 and implicit networks share."""
