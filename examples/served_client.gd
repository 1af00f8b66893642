# The client of a game with its own main loop, for protocol 2 of penstock's ServedGame, in GDScript (Godot 3).
#
#     godot3-server --script served_client.gd
#
# Copy the class Served. The rest is a game: walk along a line to a goal. The observation is [place, goal], both from 0
# to 10; the actions are 0 (left), 1 (stay) and 2 (right). The variables PENSTOCK_PORTS and PENSTOCK_TOKEN say where and
# how to connect, as they do for games that a ServedGame has started.
extends SceneTree


class Served:
	const WAIT = 60000  # milliseconds until a connection must succeed

	var seed_of_episode = 0
	var failed = ""  # why this client has stopped
	var _peer = StreamPeerTCP.new()
	var _hello = {"hello": 2}
	var _n = 0
	var _port

	func _init(port, token = ""):
		_port = port
		if token != "":
			_hello["token"] = token
		_connect()

	# Each of these returns the action, or null: the learner wants a new episode, or `failed` says why the client has stopped.

	func begin(obs):
		return _ask({"begin": obs})

	func act(obs, reward):
		return _ask({"obs": obs, "reward": reward})

	func end(obs, reward, how = "terminated"):
		return _ask({"obs": obs, "reward": reward, "end": how})

	func bye():
		_send({"bye": ""})
		_peer.disconnect_from_host()

	func _ask(message):
		_n += 1
		message["n"] = _n
		while failed == "":
			if _send(message):
				var reply = _receive()
				if reply != null:
					if reply.has("seed"):
						seed_of_episode = int(reply["seed"])
					return reply.get("action")
			_connect()  # and send the message again: the learner counts it once
		return null

	func _connect():
		var until = OS.get_ticks_msec() + WAIT
		while failed == "":
			_peer.disconnect_from_host()
			_peer = StreamPeerTCP.new()
			if _peer.connect_to_host("127.0.0.1", _port) == OK:
				while _peer.get_status() == StreamPeerTCP.STATUS_CONNECTING:
					OS.delay_msec(1)
				_peer.set_no_delay(true)
				if _send(_hello):
					var welcome = _receive()
					if welcome != null:
						_hello["session"] = welcome["session"]
						seed_of_episode = int(welcome["seed"])
						return
			if OS.get_ticks_msec() > until:
				failed = "no connection to port %d" % _port
			OS.delay_msec(50)

	func _send(message):
		if _peer.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			return false
		return _peer.put_data((to_json(message) + "\n").to_utf8()) == OK

	# The next message, or null if the connection is lost or `failed`.
	func _receive():
		var line = PoolByteArray()
		while true:
			var got = _peer.get_data(1)  # waits
			if got[0] != OK:
				return null
			if got[1][0] == 10:
				break
			line.append_array(got[1])
		var message = JSON.parse(line.get_string_from_utf8()).result
		if message.has("error"):
			failed = "the learner says: " + message["error"]
			return null
		return message


func _init():
	var served = Served.new(int(OS.get_environment("PENSTOCK_PORTS")), OS.get_environment("PENSTOCK_TOKEN"))
	while served.failed == "":
		var place = 5
		var goal = served.seed_of_episode % 11
		var action = served.begin([place, goal])
		for t in range(1, 21):
			if action == null:
				break
			place = int(clamp(place + int(action) - 1, 0, 10))
			if place == goal:
				served.end([place, goal], 1, "terminated")
				break
			if t == 20:
				served.end([place, goal], 0, "truncated")
			else:
				action = served.act([place, goal], 0)
	printerr(served.failed)
	quit(1)
