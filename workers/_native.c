/* Reads the words of the control block, and waits until they change. spinning.py says what each function does.

   Arguments that hold words are contiguous buffers of 8-byte integers. Other processes write these words, so they are
   read as atomics. While a function spins, it holds no GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* The words of a progress row, as in control.py. spinning.py compares them at import. */
enum { ARRIVED = 5, REQUESTED = 12, ROW_WORDS = 16, KIND_BITS = 2, URGENT = 2, REPLIED = 0 };
#define LAYOUT "ARRIVED:5 REQUESTED:12 ROW_WORDS:16 KIND_BITS:2 URGENT:2 REPLIED:0"
enum { KIND = (1 << KIND_BITS) - 1 };

#define YIELD_NS 100000 /* where each process has a CPU, a spinning one yields this often: the system may place two on one */
#define PAUSES 16       /* between two looks at the words */

typedef PyObject *const *Arguments;
typedef int64_t Word;

static Word load(const Word *word) { return atomic_load_explicit((const _Atomic Word *)word, memory_order_acquire); }

/* ---- arguments ------------------------------------------------------------------------------------ */

/* A buffer of `n` words. Who has got it must call PyBuffer_Release(&view). */
typedef struct {
    Py_buffer view;
    const Word *at;
    Py_ssize_t n;
} Words;

static int get_words(PyObject *object, Words *words) {
    if (PyObject_GetBuffer(object, &words->view, PyBUF_C_CONTIGUOUS) < 0) {
        return 0;
    }
    words->at = words->view.buf;
    words->n = words->view.len / (Py_ssize_t)sizeof(Word);
    if (words->view.itemsize != sizeof(Word) || (uintptr_t)words->at % sizeof(Word) != 0) {
        PyBuffer_Release(&words->view);
        PyErr_SetString(PyExc_TypeError, "expected aligned integers of 8 bytes");
        return 0;
    }
    return 1;
}

/* The parts of the control block that say what the first `n` workers do. */
typedef struct {
    Words rows, opened, replied;
    Py_ssize_t n;
} Block;

static void release_block(Block *block) {
    PyBuffer_Release(&block->rows.view);
    PyBuffer_Release(&block->opened.view);
    PyBuffer_Release(&block->replied.view);
}

/* Read the first three arguments: the words of `n` workers. Returns 0 with an exception set if there are fewer. */
static int get_block(Arguments arguments, Py_ssize_t n, Block *block) {
    *block = (Block){.n = n}; /* a view without an object may be released */
    int is_read = get_words(arguments[0], &block->rows) && get_words(arguments[1], &block->opened) &&
                  get_words(arguments[2], &block->replied);
    if (is_read && (n < 0 || n > block->opened.n || n * ROW_WORDS > block->rows.n || n * ROW_WORDS > block->replied.n)) {
        is_read = 0;
        PyErr_Format(PyExc_IndexError, "the control block does not have %zd workers", n);
    }
    if (!is_read) {
        release_block(block);
    }
    return is_read;
}

static int has_count(Py_ssize_t given, Py_ssize_t expected) {
    return given == expected || PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
}

static int get_number(PyObject *argument, Py_ssize_t *number) {
    *number = PyNumber_AsSsize_t(argument, PyExc_OverflowError);
    return *number != -1 || !PyErr_Occurred();
}

static int get_spin(PyObject *seconds, PyObject *yields, double *spin_seconds, int *always_yields) {
    *spin_seconds = PyFloat_AsDouble(seconds);
    *always_yields = PyObject_IsTrue(yields);
    return !(*spin_seconds == -1.0 && PyErr_Occurred()) && *always_yields >= 0;
}

/* ---- spinning ------------------------------------------------------------------------------------- */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_cpu(void) {
    for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory");
#else
        atomic_signal_fence(memory_order_seq_cst);
#endif
    }
}

/* Wait until `is_met(what)`, at most for `seconds`. Returns whether it was met. */
static int spin(int (*is_met)(const void *), const void *what, double seconds, int always_yields) {
    int met = is_met(what);
    if (met || !(seconds > 0)) {
        return met;
    }
    PyThreadState *state = PyEval_SaveThread();
    int64_t now = now_ns(), end = now + (int64_t)(seconds * 1e9), next_yield = now + (always_yields ? 0 : YIELD_NS);
    while (!(met = is_met(what)) && now < end) {
        if (now < next_yield) {
            pause_cpu();
        } else {
            sched_yield();
            next_yield = always_yields ? 0 : now_ns() + YIELD_NS;
        }
        now = now_ns();
    }
    PyEval_RestoreThread(state);
    return met;
}

typedef struct {
    Words word, stop;
    Word value;
} WordCondition;

static int is_reached(const void *what) {
    const WordCondition *condition = what;
    return load(condition->word.at) >= condition->value || load(condition->stop.at) != 0;
}

static PyObject *spin_for_word(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    WordCondition condition = {0};
    double seconds;
    int always_yields, met = -1;
    Py_ssize_t value;
    if (!has_count(n, 5) || !get_number(arguments[1], &value) ||
        !get_spin(arguments[3], arguments[4], &seconds, &always_yields)) {
        return NULL;
    }
    condition.value = value;
    if (get_words(arguments[0], &condition.word) && get_words(arguments[2], &condition.stop)) {
        if (condition.word.n < 1 || condition.stop.n < 1) {
            PyErr_SetString(PyExc_IndexError, "expected at least one word");
        } else {
            met = spin(is_reached, &condition, seconds, always_yields);
        }
    }
    PyBuffer_Release(&condition.word.view);
    PyBuffer_Release(&condition.stop.view);
    return met < 0 ? NULL : PyBool_FromLong(met);
}

/* ---- all workers at once -------------------------------------------------------------------------- */

static int has_arrived(const Block *block, Py_ssize_t rank) {
    return load(block->rows.at + rank * ROW_WORDS + ARRIVED) == load(block->opened.at + rank);
}

/* The kind of this worker's open request; 0 if it has none. */
static int open_kind(const Block *block, Py_ssize_t rank, Word *number) {
    Word word = load(block->rows.at + rank * ROW_WORDS + REQUESTED);
    *number = word >> KIND_BITS;
    return *number == load(block->replied.at + rank * ROW_WORDS + REPLIED) ? 0 : (int)(word & KIND);
}

/* Whether all workers are idle, or one has an urgent request. */
static int is_urgent_or_all_idle(const void *what) {
    const Block *block = what;
    int is_busy = 0;
    for (Py_ssize_t rank = 0; rank < block->n; rank++) {
        Word number;
        int kind = open_kind(block, rank, &number);
        if (kind == URGENT) {
            return 1;
        }
        is_busy |= kind == 0 && !has_arrived(block, rank);
    }
    return !is_busy;
}

static int have_all_arrived(const void *what) {
    const Block *block = what;
    for (Py_ssize_t rank = 0; rank < block->n; rank++) {
        if (!has_arrived(block, rank)) {
            return 0;
        }
    }
    return 1;
}

static PyObject *spin_for_arrivals(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Block block;
    Py_ssize_t n_workers;
    double seconds;
    int always_yields;
    if (!has_count(n, 6) || !get_number(arguments[3], &n_workers) ||
        !get_spin(arguments[4], arguments[5], &seconds, &always_yields) || !get_block(arguments, n_workers, &block)) {
        return NULL;
    }
    int met = spin(have_all_arrived, &block, seconds, always_yields);
    release_block(&block);
    return PyBool_FromLong(met);
}

static PyObject *must_wake(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Words sleeper;
    if (!has_count(n, 4) || !get_words(arguments[3], &sleeper)) {
        return NULL;
    }
    /* What was published before this must be visible before the word is read: see docs/protocol.md. */
    atomic_thread_fence(memory_order_seq_cst);
    Word word = sleeper.n < 1 ? 0 : load(sleeper.at);
    PyBuffer_Release(&sleeper.view);
    if (word <= 0) {
        return PyBool_FromLong(word < 0);
    }
    Block block;
    if (!get_block(arguments, (Py_ssize_t)word, &block)) {
        return NULL;
    }
    int is_due = is_urgent_or_all_idle(&block);
    release_block(&block);
    return PyBool_FromLong(is_due);
}

/* A number that changes with each arrival and each request. */
static uint64_t fingerprint_of(const Block *block) {
    uint64_t hash = 0;
    for (Py_ssize_t rank = 0; rank < block->n; rank++) {
        const Word *row = block->rows.at + rank * ROW_WORDS;
        hash = (hash * 1000003 + (uint64_t)load(row + ARRIVED)) * 1000003 + (uint64_t)load(row + REQUESTED);
    }
    return hash;
}

typedef struct {
    Block block;
    uint64_t fingerprint;
    int needs_all_idle;
    Words stop;
} RequestCondition;

static int is_there_work(const void *what) {
    const RequestCondition *condition = what;
    if (load(condition->stop.at) != 0) {
        return 1;
    }
    if (condition->needs_all_idle && !is_urgent_or_all_idle(&condition->block)) {
        return 0;
    }
    return fingerprint_of(&condition->block) != condition->fingerprint;
}

static PyObject *spin_for_requests(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    RequestCondition condition;
    Py_ssize_t n_workers;
    double seconds;
    int always_yields;
    if (!has_count(n, 9) || !get_number(arguments[3], &n_workers) ||
        !get_spin(arguments[7], arguments[8], &seconds, &always_yields)) {
        return NULL;
    }
    condition.fingerprint = PyLong_AsUnsignedLongLongMask(arguments[4]);
    condition.needs_all_idle = PyObject_IsTrue(arguments[5]);
    if (PyErr_Occurred() || !get_words(arguments[6], &condition.stop)) {
        return NULL;
    }
    if (condition.stop.n < 1 || !get_block(arguments, n_workers, &condition.block)) {
        PyBuffer_Release(&condition.stop.view);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "expected at least one word");
    }
    int met = spin(is_there_work, &condition, seconds, always_yields);
    PyBuffer_Release(&condition.stop.view);
    release_block(&condition.block);
    return PyBool_FromLong(met);
}

/* Append the number to the list; returns 0 with an exception set if there is no memory. */
static int append(PyObject *list, long long number) {
    PyObject *object = PyLong_FromLongLong(number);
    int is_appended = object != NULL && PyList_Append(list, object) == 0;
    Py_XDECREF(object);
    return is_appended;
}

static PyObject *look(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Block block;
    Py_ssize_t n_workers;
    if (!has_count(n, 4) || !get_number(arguments[3], &n_workers) || !get_block(arguments, n_workers, &block)) {
        return NULL;
    }
    uint64_t fingerprint = fingerprint_of(&block); /* first: what comes during the look changes the next one */
    PyObject *ordinary = PyList_New(0), *urgent = PyList_New(0), *busy = PyList_New(0), *numbers = PyList_New(0);
    int is_complete = ordinary != NULL && urgent != NULL && busy != NULL && numbers != NULL;
    for (Py_ssize_t rank = 0; rank < n_workers && is_complete; rank++) {
        Word number;
        int kind = open_kind(&block, rank, &number);
        is_complete = append(numbers, number);
        if (is_complete && kind != 0) {
            is_complete = append(kind == URGENT ? urgent : ordinary, rank);
        } else if (is_complete && !has_arrived(&block, rank)) {
            is_complete = append(busy, rank);
        }
    }
    release_block(&block);
    PyObject *found = NULL;
    if (is_complete) {
        found = Py_BuildValue("OOOOK", urgent, ordinary, busy, numbers, (unsigned long long)fingerprint);
    }
    Py_XDECREF(ordinary);
    Py_XDECREF(urgent);
    Py_XDECREF(busy);
    Py_XDECREF(numbers);
    return found;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(spin_for_word), FUNCTION(spin_for_arrivals), FUNCTION(spin_for_requests), FUNCTION(must_wake), FUNCTION(look),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringMacro(module, LAYOUT) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
