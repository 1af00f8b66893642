/* One time step of all environments of a worker, and steps and resets without the Python functions of Gymnasium's
   wrappers. native.py says what each function does. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

typedef PyObject *const *Arguments;

/* Convert `argument` to an index. Returns 0 with an exception set if that is impossible. */
static int read_index(PyObject *argument, Py_ssize_t *index) {
    *index = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    return *index != -1 || !PyErr_Occurred();
}

/* ---- one time step ------------------------------------------------------------------------------ */

/* The arguments of step_ordinary. `outs` and `on_end` may be None. */
typedef struct {
    PyObject *bound, *actions, *outs, *observations, *rewards, *on_end;
    int64_t *words;
    Py_ssize_t n_words, watch;
} Row;

/* Values of `watch`; the same as in native.py. */
enum { WATCH_ALL = 1, WATCH_UNUSUAL = 2 };

/* One environment's step: its column, the array that step_into writes (NULL with step), and the result. */
typedef struct {
    Py_ssize_t column;
    PyObject *out, *result;
} Step;

/* Call `env.step(action)` or `env.step_into(out, action)` of `entry`, (column, env_rank, env.step, env.step_into).
   Returns 0 with an exception set if that raises. */
static int call_step(const Row *row, PyObject *entry, PyObject *action, Step *step) {
    Py_ssize_t env_rank;
    if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 4) {
        PyErr_Format(PyExc_TypeError, "bound must be a list of (column, env_rank, env.step, env.step_into)");
        return 0;
    }
    if (!read_index(PyTuple_GET_ITEM(entry, 0), &step->column) || !read_index(PyTuple_GET_ITEM(entry, 1), &env_rank)) {
        return 0;
    }
    row->words[row->n_words - 1] = env_rank;
    PyObject *step_into = PyTuple_GET_ITEM(entry, 3);
    if (row->outs == Py_None || step_into == Py_None) {
        PyObject *arguments[] = {NULL, action};
        size_t n = 1 | PY_VECTORCALL_ARGUMENTS_OFFSET;
        step->result = PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 2), arguments + 1, n, NULL);
        return step->result != NULL;
    }
    if (step->column < 0 || step->column >= PyList_GET_SIZE(row->outs)) {
        PyErr_Format(PyExc_IndexError, "outs has no entry for column %zd", step->column);
        return 0;
    }
    step->out = Py_NewRef(PyList_GET_ITEM(row->outs, step->column));
    PyObject *arguments[] = {NULL, step->out, action};
    step->result = PyObject_Vectorcall(step_into, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    return step->result != NULL;
}

/* Store the result of an ordinary step. Returns 1, or 0 if the step is not ordinary, or -1 with an exception set. */
static int store(const Row *row, const Step *step) {
    PyObject *result = step->result;
    Py_ssize_t at = step->out == NULL; /* where the reward is: step_into returns no observation */
    if (row->watch == WATCH_ALL || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != at + 4) {
        return 0;
    }
    PyObject *reward = PyTuple_GET_ITEM(result, at), *terminated = PyTuple_GET_ITEM(result, at + 1);
    PyObject *truncated = PyTuple_GET_ITEM(result, at + 2), *observation = at ? PyTuple_GET_ITEM(result, 0) : step->out;
    PyObject *info = PyTuple_GET_ITEM(result, at + 3);
    if (!PyBool_Check(terminated) || !PyBool_Check(truncated) || !PyDict_CheckExact(info)) {
        return 0;
    }
    if (row->watch == WATCH_UNUSUAL && (PyDict_GET_SIZE(info) != 0 || !PyFloat_CheckExact(reward))) {
        return 0;
    }
    if (terminated == Py_False && truncated == Py_False) {
        Py_INCREF(observation);
    } else {
        if (row->on_end == Py_None || !PyFloat_CheckExact(reward)) {
            return 0;
        }
        PyObject *column = PyLong_FromSsize_t(step->column);
        if (column == NULL) {
            return -1;
        }
        int64_t phase = row->words[0];
        PyObject *arguments[] = {NULL, column, observation, reward, terminated, truncated};
        observation = PyObject_Vectorcall(row->on_end, arguments + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        Py_DECREF(column);
        if (observation == NULL) {
            return -1;
        }
        row->words[0] = phase;
    }
    int is_stored = PyList_SetItem(row->observations, step->column, observation) == 0 &&
                    PyList_SetItem(row->rewards, step->column, Py_NewRef(reward)) == 0;
    return is_stored ? 1 : -1;
}

/* Step the environments from `first` on. Returns None, or (index, result) of the first step that is not ordinary. */
static PyObject *step_all(const Row *row, Py_ssize_t first) {
    Py_ssize_t n = PyList_GET_SIZE(row->bound);
    for (Py_ssize_t i = first; i < n; i++) {
        if (i >= PyList_GET_SIZE(row->bound) || i >= PyList_GET_SIZE(row->actions)) {
            return PyErr_Format(PyExc_IndexError, "bound or actions became shorter during a step");
        }
        /* New references, because the step may remove them from the lists. */
        PyObject *entry = Py_NewRef(PyList_GET_ITEM(row->bound, i)), *action = Py_NewRef(PyList_GET_ITEM(row->actions, i));
        Step step = {0, NULL, NULL};
        int result = call_step(row, entry, action, &step) ? store(row, &step) : -1;
        Py_DECREF(action);
        Py_DECREF(entry);
        Py_XDECREF(step.out);
        if (result == 0) {
            return Py_BuildValue("nN", i, step.result);
        }
        Py_XDECREF(step.result);
        /* A step in C does not handle signals, so do it here. */
        if (result < 0 || PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* Check the arguments, then step the environments. */
static PyObject *step_row(Row *row, Py_ssize_t first) {
    if (!PyList_Check(row->bound) || !PyList_Check(row->actions) || !PyList_Check(row->observations) ||
        !PyList_Check(row->rewards) || !(row->outs == Py_None || PyList_Check(row->outs))) {
        return PyErr_Format(PyExc_TypeError, "bound, actions, outs, observations and rewards must be lists");
    }
    Py_ssize_t n_actions = PyList_GET_SIZE(row->actions), n_bound = PyList_GET_SIZE(row->bound);
    if (n_actions != n_bound) {
        return PyErr_Format(PyExc_ValueError, "expected %zd actions, got %zd", n_bound, n_actions);
    }
    if (first < 0) {
        return PyErr_Format(PyExc_IndexError, "there is no environment %zd", first);
    }
    return step_all(row, first);
}

PyObject *penstock_step_ordinary(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first;
    if (n != 9) {
        return PyErr_Format(PyExc_TypeError, "expected 9 arguments, got %zd", n);
    }
    Row row = {.bound = arguments[1], .actions = arguments[2], .outs = arguments[3], .observations = arguments[6],
               .rewards = arguments[7], .on_end = arguments[8]};
    if (!read_index(arguments[4], &first) || !read_index(arguments[5], &row.watch)) {
        return NULL;
    }
    Py_buffer words;
    if (PyObject_GetBuffer(arguments[0], &words, PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    int is_int64 = words.itemsize == 8 && (strcmp(words.format, "l") == 0 || strcmp(words.format, "q") == 0);
    if (words.ndim == 1 && words.shape[0] > 0 && is_int64) {
        row.words = words.buf, row.n_words = words.shape[0];
        result = step_row(&row, first);
    } else {
        PyErr_Format(PyExc_TypeError, "words must be an array of int64 numbers");
    }
    PyBuffer_Release(&words);
    return result;
}

/* ---- wrappers ---------------------------------------------------------------------------------- */

/* The names that are looked up. They are made at import and live for ever. */
static PyObject *ENV, *STEP, *RESET, *SEED, *OPTIONS, *HAS_RESET, *ELAPSED_STEPS, *MAX_EPISODE_STEPS;
static PyObject *SEED_AND_OPTIONS, *ZERO, *ONE;

int penstock_make_names(void) {
    return (ENV = PyUnicode_InternFromString("env")) && (STEP = PyUnicode_InternFromString("step")) &&
           (RESET = PyUnicode_InternFromString("reset")) && (SEED = PyUnicode_InternFromString("seed")) &&
           (OPTIONS = PyUnicode_InternFromString("options")) &&
           (HAS_RESET = PyUnicode_InternFromString("_has_reset")) &&
           (ELAPSED_STEPS = PyUnicode_InternFromString("_elapsed_steps")) &&
           (MAX_EPISODE_STEPS = PyUnicode_InternFromString("_max_episode_steps")) && (ZERO = PyLong_FromLong(0)) &&
           (ONE = PyLong_FromLong(1)) && (SEED_AND_OPTIONS = PyTuple_Pack(2, SEED, OPTIONS));
}

/* The `self` of a flat function (step or reset): a tuple (step of the outermost wrapper, environment inside, layers,
   finish). Each layer is (wrapper, its attributes, what it wraps, whether it is a TimeLimit), the outermost first. */
#define METHOD(self) PyTuple_GET_ITEM(self, 0)
#define INSIDE(self) PyTuple_GET_ITEM(self, 1)
#define LAYERS(self) PyTuple_GET_ITEM(self, 2)
#define FINISH(self) PyTuple_GET_ITEM(self, 3)
#define WRAPPER(layer) PyTuple_GET_ITEM(layer, 0)
#define ATTRIBUTES(layer) PyTuple_GET_ITEM(layer, 1)
#define WRAPPED(layer) PyTuple_GET_ITEM(layer, 2)
#define IS_TIME_LIMIT(layer) (PyTuple_GET_ITEM(layer, 3) == Py_True)

/* The attribute `name` of a layer's wrapper, borrowed. NULL without an exception if there is none. */
static PyObject *attribute(PyObject *layer, PyObject *name) {
    PyObject *value = PyDict_GetItemWithError(ATTRIBUTES(layer), name);
    if (value == NULL) {
        PyErr_Clear(); /* the wrapper's own method raises it again */
    }
    return value;
}

/* Whether every wrapper still wraps the same environment, and no wrapper from layer `first` on has an attribute that
   hides its method `name`. */
static int are_unchanged(PyObject *layers, PyObject *name, Py_ssize_t first) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layers); i++) {
        PyObject *layer = PyTuple_GET_ITEM(layers, i);
        if (attribute(layer, ENV) != WRAPPED(layer) || (i >= first && attribute(layer, name) != NULL)) {
            return 0;
        }
    }
    return 1;
}

/* What TimeLimit.step does with the `result` of the step inside. Takes over the reference to `result`. If the values
   are unusual, the Python function FINISH does it. */
static PyObject *count_step(PyObject *self, PyObject *layer, PyObject *result) {
    PyObject *elapsed = attribute(layer, ELAPSED_STEPS), *most = attribute(layer, MAX_EPISODE_STEPS), *next, *cut;
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5 || elapsed == NULL || !PyLong_CheckExact(elapsed) ||
        most == NULL || !PyLong_CheckExact(most)) {
        PyObject *arguments[] = {NULL, WRAPPER(layer), result};
        next = PyObject_Vectorcall(FINISH(self), arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        Py_DECREF(result);
        return next;
    }
    Py_INCREF(most);
    next = PyNumber_Add(elapsed, ONE);
    int is_set = next != NULL && PyDict_SetItem(ATTRIBUTES(layer), ELAPSED_STEPS, next) == 0;
    int is_over = is_set ? PyObject_RichCompareBool(next, most, Py_GE) : -1;
    Py_XDECREF(next);
    Py_DECREF(most);
    if (is_over == 0) {
        return result;
    }
    cut = is_over < 0 ? NULL
                      : PyTuple_Pack(5, PyTuple_GET_ITEM(result, 0), PyTuple_GET_ITEM(result, 1),
                                     PyTuple_GET_ITEM(result, 2), Py_True, PyTuple_GET_ITEM(result, 4));
    Py_DECREF(result);
    return cut;
}

/* `step(action)` */
static PyObject *flat_step(PyObject *self, PyObject *action) {
    PyObject *layers = LAYERS(self);
    int is_flat = are_unchanged(layers, STEP, 1); /* 1: the outermost `step`, which is METHOD, was looked up only once */
    for (Py_ssize_t i = 0; is_flat && i < PyTuple_GET_SIZE(layers); i++) {
        PyObject *layer = PyTuple_GET_ITEM(layers, i);
        is_flat = IS_TIME_LIMIT(layer) || attribute(layer, HAS_RESET) == Py_True;
    }
    PyObject *arguments[] = {NULL, INSIDE(self), action};
    size_t offset = PY_VECTORCALL_ARGUMENTS_OFFSET;
    if (!is_flat) {
        return PyObject_Vectorcall(METHOD(self), arguments + 2, 1 | offset, NULL);
    }
    PyObject *result = PyObject_VectorcallMethod(STEP, arguments + 1, 2 | offset, NULL);
    for (Py_ssize_t i = PyTuple_GET_SIZE(layers) - 1; i >= 0 && result != NULL; i--) {
        PyObject *layer = PyTuple_GET_ITEM(layers, i);
        result = IS_TIME_LIMIT(layer) ? count_step(self, layer, result) : result;
    }
    return result;
}

/* `reset(seed=...)` or `reset(seed=..., options=...)` */
static PyObject *flat_reset(PyObject *self, Arguments arguments, Py_ssize_t n, PyObject *names) {
    PyObject *layers = LAYERS(self);
    Py_ssize_t n_names = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    int has_seed = n == 0 && (n_names == 1 || n_names == 2) && PyTuple_GET_ITEM(names, 0) == SEED;
    int is_usual = has_seed && (n_names == 1 || PyTuple_GET_ITEM(names, 1) == OPTIONS);
    if (!is_usual || !are_unchanged(layers, RESET, 0)) {
        PyObject *method = PyObject_GetAttr(WRAPPER(PyTuple_GET_ITEM(layers, 0)), RESET);
        PyObject *result = method == NULL ? NULL : PyObject_Vectorcall(method, arguments, n, names);
        Py_XDECREF(method);
        return result;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layers); i++) {
        PyObject *layer = PyTuple_GET_ITEM(layers, i);
        int is_limit = IS_TIME_LIMIT(layer);
        if (PyDict_SetItem(ATTRIBUTES(layer), is_limit ? ELAPSED_STEPS : HAS_RESET, is_limit ? ZERO : Py_True) < 0) {
            return NULL;
        }
    }
    PyObject *given[] = {NULL, INSIDE(self), arguments[0], n_names == 2 ? arguments[1] : Py_None};
    return PyObject_VectorcallMethod(RESET, given + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, SEED_AND_OPTIONS);
}

static PyMethodDef flat_functions[] = {
    {"step", flat_step, METH_O, NULL},
    {"reset", (PyCFunction)(void (*)(void))flat_reset, METH_FASTCALL | METH_KEYWORDS, NULL},
};

static int is_layer(PyObject *layer) {
    return PyTuple_CheckExact(layer) && PyTuple_GET_SIZE(layer) == 4 && PyDict_CheckExact(ATTRIBUTES(layer));
}

PyObject *penstock_flat_methods(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (n != 4) {
        return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", n);
    }
    PyObject *layers = arguments[2];
    int fits = PyTuple_CheckExact(layers) && PyTuple_GET_SIZE(layers) > 0;
    for (Py_ssize_t i = 0; fits && i < PyTuple_GET_SIZE(layers); i++) {
        fits = is_layer(PyTuple_GET_ITEM(layers, i));
    }
    if (!fits) {
        return PyErr_Format(PyExc_TypeError, "layers must be a tuple of (wrapper, attributes, wrapped, is_time_limit)");
    }
    PyObject *self = PyTuple_Pack(4, arguments[0], arguments[1], layers, arguments[3]);
    PyObject *step = self == NULL ? NULL : PyCFunction_NewEx(&flat_functions[0], self, NULL);
    PyObject *reset = self == NULL ? NULL : PyCFunction_NewEx(&flat_functions[1], self, NULL);
    PyObject *result = step == NULL || reset == NULL ? NULL : PyTuple_Pack(2, step, reset);
    Py_XDECREF(self);
    Py_XDECREF(step);
    Py_XDECREF(reset);
    return result;
}
