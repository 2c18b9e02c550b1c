"""tf.distribute's strategies: a function that runs once per replica."""
