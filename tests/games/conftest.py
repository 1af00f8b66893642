"""Workers cannot import the module that the tests of games share."""

import cloudpickle

from . import games_support

cloudpickle.register_pickle_by_value(games_support)
