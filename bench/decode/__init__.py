"""Dense against sparse decode on one machine, in one run: arms, worker, driver."""
