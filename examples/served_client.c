/* The client of a game with its own main loop, for protocol 2 of penstock's ServedGame, in C without libraries.

       cc -O2 -o served_client served_client.c && ./served_client PORT EPISODES

   The functions served_* are the client: copy them. main is a game: walk along a line to a goal. The observation is
   [place, goal], both from 0 to 10; the actions are 0 (left), 1 (stay) and 2 (right). Without a PORT, the variables
   PENSTOCK_PORTS and PENSTOCK_TOKEN say where and how to connect, as they do for games that a ServedGame has started. */

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SERVED_WAIT 60 /* seconds until a connection must succeed */

typedef struct {
    const char *host, *port, *token;
    char session[32], message[65536], reply[65536];
    int socket; /* -1: not connected */
    long n, seed;
} Served;

static void served_stop(const char *why, const char *what) {
    fprintf(stderr, "served_client: %s %s\n", why, what);
    exit(1);
}

/* The number after "name": in a reply. Returns 0 if it is not there. */
static int served_number(const char *reply, const char *name, long *value) {
    char key[40];
    snprintf(key, sizeof key, "\"%s\"", name);
    const char *found = strstr(reply, key);
    return found && sscanf(found + strlen(key), " : %ld", value) == 1;
}

/* Send a line and read one. Returns 0 if the connection is lost. */
static int served_exchange(Served *s, const char *line) {
    size_t length = strlen(line), got = 0;
    for (size_t sent = 0; sent < length;) {
        ssize_t done = send(s->socket, line + sent, length - sent, MSG_NOSIGNAL);
        if (done <= 0)
            return 0;
        sent += (size_t)done;
    }
    while (got == 0 || s->reply[got - 1] != '\n') {
        ssize_t done = recv(s->socket, s->reply + got, sizeof s->reply - 1 - got, 0);
        if (done <= 0)
            return 0;
        got += (size_t)done;
    }
    s->reply[got] = 0;
    if (strncmp(s->reply, "{\"error\"", 8) == 0)
        served_stop("the learner says", s->reply);
    return 1;
}

static int served_connect_once(Served *s) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    char hello[1024], *session;
    if (getaddrinfo(s->host, s->port, &hints, &found) != 0)
        served_stop("unknown host", s->host);
    s->socket = socket(found->ai_family, found->ai_socktype, 0);
    int failed = connect(s->socket, found->ai_addr, found->ai_addrlen), yes = 1;
    freeaddrinfo(found);
    setsockopt(s->socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    snprintf(hello, sizeof hello, "{\"hello\": 2, \"token\": \"%s\"%s%s%s}\n", s->token,
             s->session[0] ? ", \"session\": \"" : "", s->session, s->session[0] ? "\"" : "");
    if (failed || !served_exchange(s, hello)) {
        close(s->socket);
        s->socket = -1;
        return 0;
    }
    session = strstr(s->reply, "\"session\"");
    if (!session || sscanf(session + 9, " : \"%31[^\"]", s->session) != 1 || !served_number(s->reply, "seed", &s->seed))
        served_stop("a wrong welcome:", s->reply);
    return 1;
}

static void served_connect(Served *s) {
    for (time_t until = time(NULL) + SERVED_WAIT; !served_connect_once(s); usleep(50000))
        if (time(NULL) > until)
            served_stop("no connection to port", s->port);
}

/* Send what follows "n": in the next message. Returns the action, or -1: the learner has begun the next episode. If the
   connection is lost, connect and send the message again. The learner counts it once. */
static long served_ask(Served *s, const char *format, ...) {
    long action, n;
    int used = snprintf(s->message, sizeof s->message, "{\"n\": %ld, ", ++s->n);
    va_list values;
    va_start(values, format);
    used += vsnprintf(s->message + used, sizeof s->message - (size_t)used, format, values);
    va_end(values);
    if ((size_t)used + 3 > sizeof s->message)
        served_stop("a message is too long:", format);
    strcat(s->message, "}\n");
    while (!served_exchange(s, s->message)) {
        close(s->socket);
        served_connect(s);
    }
    if (!served_number(s->reply, "n", &n) || n != s->n)
        served_stop("a wrong reply:", s->reply);
    if (served_number(s->reply, "action", &action))
        return action;
    served_number(s->reply, "seed", &s->seed);
    return -1;
}

int main(int argc, char **argv) {
    const char *ports = getenv("PENSTOCK_PORTS"), *token = getenv("PENSTOCK_TOKEN");
    static Served s = {.host = "127.0.0.1", .socket = -1};
    s.port = argc > 1 ? argv[1] : ports, s.token = token ? token : "";
    if (!s.port)
        served_stop("give a port, or set", "PENSTOCK_PORTS");
    served_connect(&s);
    for (int episode = 0; argc < 3 || episode < atoi(argv[2]); episode++) {
        long place = 5, goal = s.seed % 11, t = 0;
        long action = served_ask(&s, "\"begin\": [%ld, %ld]", place, goal);
        while (action >= 0) {
            place += action - 1;
            place = place < 0 ? 0 : place > 10 ? 10 : place;
            int is_there = place == goal, is_over = is_there || ++t == 20;
            action = served_ask(&s, "\"obs\": [%ld, %ld], \"reward\": %d%s", place, goal, is_there,
                                !is_over ? "" : is_there ? ", \"end\": \"terminated\"" : ", \"end\": \"truncated\"");
        }
    }
    return send(s.socket, "{\"bye\": \"\"}\n", 12, MSG_NOSIGNAL) == 12 && close(s.socket) == 0 ? 0 : 1;
}
