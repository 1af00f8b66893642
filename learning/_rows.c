/* A batch's way into the ring, and frames' way out of it: see appending.py, ring.py and observations.py, which say what
   each function does and have the same in numpy. */

#include "_native.h"

/* ---- append ------------------------------------------------------------------------------------ */

/* pack_flags(valid, terminated, truncated, begins, out) */
PyObject *pack_flags(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    enum { N_ARRAYS = 5 };
    PyArrayObject *arrays[N_ARRAYS];
    if (!check_arguments(n_arguments, N_ARRAYS)) {
        return NULL;
    }
    for (int i = 0; i < N_ARRAYS; i++) {
        PyArrayObject *array = PyArray_CheckExact(arguments[i]) ? (PyArrayObject *)arguments[i] : NULL;
        arrays[i] = array;
        int type = i < N_ARRAYS - 1 ? NPY_BOOL : NPY_UINT8;
        if (array == NULL || PyArray_NDIM(array) != 2 || PyArray_TYPE(array) != type ||
            (PyArray_STRIDE(array, 1) != 1 && PyArray_DIM(array, 1) != 1) || !PyArray_SAMESHAPE(array, arrays[0])) {
            return PyLong_FromLong(-1);
        }
    }
    npy_intp T = PyArray_DIM(arrays[0], 0), B = PyArray_DIM(arrays[0], 1), n_truncated = 0;
    for (npy_intp t = 0; t < T; t++) {
        const npy_uint8 *valid = PyArray_GETPTR1(arrays[0], t), *terminated = PyArray_GETPTR1(arrays[1], t);
        const npy_uint8 *truncated = PyArray_GETPTR1(arrays[2], t), *begins = PyArray_GETPTR1(arrays[3], t);
        npy_uint8 *out = PyArray_GETPTR1(arrays[4], t);
        for (npy_intp b = 0; b < B; b++) {
            out[b] = (npy_uint8)((valid[b] != 0) | (terminated[b] != 0) << 1 | (truncated[b] != 0) << 2 |
                                 (begins[b] != 0) << 3);
            n_truncated += (out[b] & (VALID | TERMINATED | TRUNCATED)) == (VALID | TRUNCATED);
        }
    }
    return PyLong_FromSsize_t(n_truncated);
}

/* One array of a batch `[t, b, ...]`, and where it goes in the ring `[T, B, ...]`. */
typedef struct {
    char *target;
    const char *source;
    npy_intp row, t_stride, b_stride; /* bytes from one row to the next in the ring, and the strides of the source */
    npy_intp chunk, n_chunks;         /* bytes that are contiguous in a row of both, and how many of these a row has */
} Leaf;

/* Fill `leaf` for the columns of the ring from `column` on. Returns 0 if the layout is not one that it knows. */
static int read_leaf(PyObject *target_object, PyObject *source_object, npy_intp column, Leaf *leaf) {
    if (!PyArray_CheckExact(target_object) || !PyArray_CheckExact(source_object)) {
        return 0;
    }
    PyArrayObject *target = (PyArrayObject *)target_object, *source = (PyArrayObject *)source_object;
    int n_dims = PyArray_NDIM(source);
    if (n_dims < 2 || PyArray_NDIM(target) != n_dims || !PyArray_ISCARRAY(target) ||
        !PyArray_EquivTypes(PyArray_DESCR(target), PyArray_DESCR(source)) ||
        PyDataType_REFCHK(PyArray_DESCR(target)) || PyArray_DIM(source, 1) + column > PyArray_DIM(target, 1)) {
        return 0;
    }
    npy_intp item = PyArray_ITEMSIZE(source), n_columns = PyArray_DIM(source, 1);
    for (int i = n_dims - 1; i >= 2; i--) {
        if (PyArray_DIM(source, i) != PyArray_DIM(target, i) ||
            (PyArray_STRIDE(source, i) != item && PyArray_DIM(source, i) != 1)) {
            return 0;
        }
        item *= PyArray_DIM(source, i);
    }
    int joins = n_columns == 1 || PyArray_STRIDE(source, 1) == item;
    *leaf = (Leaf){
        .target = PyArray_BYTES(target) + column * item,
        .source = PyArray_BYTES(source),
        .row = PyArray_STRIDE(target, 0),
        .t_stride = PyArray_STRIDE(source, 0),
        .b_stride = PyArray_STRIDE(source, 1),
        .chunk = joins ? n_columns * item : item,
        .n_chunks = joins ? 1 : n_columns,
    };
    return 1;
}

/* Copy rows of the batch from `t` on to `count` rows of the ring from `row` on. */
static void copy_leaf(const Leaf *leaf, npy_intp row, npy_intp t, npy_intp count) {
    char *target = leaf->target + row * leaf->row;
    const char *source = leaf->source + t * leaf->t_stride;
    if (leaf->n_chunks == 1 && leaf->chunk == leaf->row && leaf->t_stride == leaf->row) {
        memcpy(target, source, (size_t)(count * leaf->row));
        return;
    }
    for (; count > 0; count--, target += leaf->row, source += leaf->t_stride) {
        for (npy_intp b = 0; b < leaf->n_chunks; b++) {
            memcpy(target + b * leaf->chunk, source + b * leaf->b_stride, (size_t)leaf->chunk);
        }
    }
}

/* copy_rows(targets, sources, row, column) */
PyObject *copy_rows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    enum { MOST = 64 };
    Leaf leaves[MOST];
    if (n_arguments != 4 || !PyTuple_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two tuples of arrays, a row and a column");
        return NULL;
    }
    Py_ssize_t row = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError);
    Py_ssize_t column = PyNumber_AsSsize_t(arguments[3], PyExc_IndexError), n = PyTuple_GET_SIZE(arguments[0]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    int is_known = n > 0 && n <= MOST && PyTuple_GET_SIZE(arguments[1]) == n && row >= 0 && column >= 0;
    npy_intp t = 0, T = 0;
    for (Py_ssize_t i = 0; is_known && i < n; i++) {
        PyObject *target = PyTuple_GET_ITEM(arguments[0], i), *source = PyTuple_GET_ITEM(arguments[1], i);
        is_known = read_leaf(target, source, column, &leaves[i]);
        if (is_known && i == 0) {
            t = PyArray_DIM((PyArrayObject *)source, 0);
            T = PyArray_DIM((PyArrayObject *)target, 0);
            is_known = t <= T && row < T;
        }
        is_known = is_known && PyArray_DIM((PyArrayObject *)source, 0) == t && PyArray_DIM((PyArrayObject *)target, 0) == T;
    }
    if (!is_known) {
        Py_RETURN_FALSE;
    }
    npy_intp fits = t < T - row ? t : T - row;
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < n; i++) {
        copy_leaf(&leaves[i], row, 0, fits);
        copy_leaf(&leaves[i], 0, fits, t - fits);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

/* same_rows(targets, sources, row, column, prev_done) */
PyObject *same_rows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    if (n_arguments != 5 || !PyTuple_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1]) ||
        PyTuple_GET_SIZE(arguments[0]) != PyTuple_GET_SIZE(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "expected two tuples of as many arrays, a row, a column and an array");
        return NULL;
    }
    Py_ssize_t row = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError);
    Py_ssize_t column = PyNumber_AsSsize_t(arguments[3], PyExc_IndexError);
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyArrayObject *done = PyArray_CheckExact(arguments[4]) ? (PyArrayObject *)arguments[4] : NULL;
    int is_same = done != NULL && PyArray_NDIM(done) == 2 && PyArray_TYPE(done) == NPY_BOOL && PyArray_DIM(done, 0) > 0 &&
                  row >= 0 && column >= 0;
    for (Py_ssize_t i = 0; is_same && i < PyTuple_GET_SIZE(arguments[0]); i++) {
        PyObject *target = PyTuple_GET_ITEM(arguments[0], i), *source = PyTuple_GET_ITEM(arguments[1], i);
        Leaf leaf;
        is_same = read_leaf(target, source, column, &leaf) && row < PyArray_DIM((PyArrayObject *)target, 0) &&
                  PyArray_DIM((PyArrayObject *)source, 0) > 0 &&
                  PyArray_DIM((PyArrayObject *)source, 1) == PyArray_DIM(done, 1);
        if (!is_same) {
            break;
        }
        npy_intp n_columns = PyArray_DIM(done, 1), size = leaf.n_chunks == 1 ? leaf.chunk / n_columns : leaf.chunk;
        const char *kept = leaf.target + row * leaf.row;
        for (npy_intp b = 0; is_same && b < n_columns; b++) {
            is_same = *(const npy_bool *)PyArray_GETPTR2(done, 0, b) ||
                      memcmp(kept + b * size, leaf.source + b * leaf.b_stride, (size_t)size) == 0;
        }
    }
    return PyBool_FromLong(is_same);
}

/* take_rows(source, at, out) */
PyObject *take_rows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    enum { N_AHEAD = 16, MOST_BYTES = 512 }; /* rows, and bytes of each, that are loaded before they are copied */
    if (!check_arguments(n_arguments, 3)) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if (!PyArray_CheckExact(arguments[i]) || !PyArray_ISCARRAY_RO((PyArrayObject *)arguments[i])) {
            Py_RETURN_FALSE;
        }
    }
    PyArrayObject *source = (PyArrayObject *)arguments[0], *at = (PyArrayObject *)arguments[1];
    PyArrayObject *out = (PyArrayObject *)arguments[2];
    int n_leading = PyArray_NDIM(at), n_rest = PyArray_NDIM(source) - 1;
    int is_known = n_rest >= 0 && PyArray_TYPE(at) == NPY_INT64 && PyArray_ISWRITEABLE(out) &&
                   PyArray_NDIM(out) == n_leading + n_rest && PyArray_SIZE(source) > 0 &&
                   PyArray_EquivTypes(PyArray_DESCR(source), PyArray_DESCR(out)) &&
                   !PyDataType_REFCHK(PyArray_DESCR(source));
    for (int i = 0; is_known && i < n_leading + n_rest; i++) {
        is_known = PyArray_DIM(out, i) == (i < n_leading ? PyArray_DIM(at, i) : PyArray_DIM(source, i - n_leading + 1));
    }
    if (!is_known) {
        Py_RETURN_FALSE;
    }
    npy_intp size = PyArray_DIM(source, 0), item = PyArray_NBYTES(source) / size, count = PyArray_SIZE(at);
    const npy_int64 *entry = PyArray_DATA(at);
    const char *from = PyArray_BYTES(source);
    char *into = PyArray_BYTES(out);
    for (npy_intp i = 0; i < count; i++) {
        if (entry[i] < 0 || entry[i] >= size) {
            PyErr_SetString(PyExc_IndexError, "an entry is not in the ring");
            return NULL;
        }
    }
    for (npy_intp i = -N_AHEAD; i < count; i++) {
        if (i + N_AHEAD < count) {
            const char *next = from + entry[i + N_AHEAD] * item;
            for (npy_intp line = 0; line < item && line < MOST_BYTES; line += 64) {
                PREFETCH(next + line);
            }
        }
        if (i >= 0) {
            memcpy(into + i * item, from + entry[i] * item, (size_t)item);
        }
    }
    Py_RETURN_TRUE;
}

/* ---- frames ------------------------------------------------------------------------------------ */

/* read_ages(flags, at, B, back, age, known) */
PyObject *read_ages(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    PyArrayObject *flags, *at, *ages, *known;
    if (!check_arguments(n_arguments, 6) || !read_line(arguments[0], NPY_UINT8, &flags) ||
        !read_line(arguments[1], NPY_INT64, &at) || !read_line(arguments[4], NPY_INT64, &ages) ||
        !read_line(arguments[5], NPY_BOOL, &known)) {
        return NULL;
    }
    Py_ssize_t B = PyNumber_AsSsize_t(arguments[2], PyExc_IndexError);
    Py_ssize_t back = PyNumber_AsSsize_t(arguments[3], PyExc_IndexError);
    npy_intp size = PyArray_SIZE(flags), count = PyArray_SIZE(at);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (B < 1 || B > size || back < 0 || PyArray_SIZE(ages) != count || PyArray_SIZE(known) != count) {
        PyErr_SetString(PyExc_ValueError, "the sizes of the arrays do not fit together");
        return NULL;
    }
    const npy_uint8 *flag = PyArray_DATA(flags);
    const npy_int64 *entry = PyArray_DATA(at);
    npy_int64 *age = PyArray_DATA(ages);
    npy_bool *is_known = PyArray_DATA(known);
    for (npy_intp i = 0; i < count; i++) {
        npy_int64 row = entry[i], k = 0;
        if (row < 0 || row >= size) {
            PyErr_SetString(PyExc_IndexError, "an entry is not in the ring");
            return NULL;
        }
        while (k < back && !(flag[row] & BEGINS)) {
            row -= B;
            row += row < 0 ? size : 0;
            k++;
        }
        age[i] = k;
        is_known[i] = k == back || !(flag[row] & PARTIAL);
    }
    Py_RETURN_NONE;
}

enum { MOST_AHEAD = 16384 }; /* bytes to load ahead: more would not stay in the first cache */

/* The frames of the ring: how many, the bytes of one, how many a stack has, and whether padding is zero. */
typedef struct {
    const char *frames;
    npy_intp size, item, n, B;
    int is_zero;
} Frames;

/* Stacks to build: of `count` entries, `age` rows after the begin of their episodes. */
typedef struct {
    const npy_int64 *entry, *age;
    char *out;
} Stacks;

/* The place of frame j of stack i, oldest first; NULL: zeros. */
static inline const char *frame_of(const Stacks *stacks, npy_intp i, npy_intp j, const Frames *of) {
    npy_int64 k = of->n - 1 - j, age = stacks->age[i];
    if (k > age && of->is_zero) {
        return NULL;
    }
    npy_int64 row = stacks->entry[i] - of->B * (k < age ? k : age);
    return of->frames + (row < 0 ? row + of->size : row) * of->item;
}

/* Read the arguments (at, age, out) of `take_frames`. Returns 1; 0 if the layout is unknown; -1 with an exception set. */
static int read_stacks(Arguments arguments, PyArrayObject *frames, const Frames *of, npy_intp count, Stacks *stacks) {
    PyArrayObject *at, *ages;
    if (!read_line(arguments[0], NPY_INT64, &at) || !read_line(arguments[1], NPY_INT64, &ages)) {
        return -1;
    }
    PyArrayObject *out = (PyArrayObject *)arguments[2];
    int is_known = PyArray_CheckExact(arguments[2]) && PyArray_ISCARRAY(out) &&
                   PyArray_NDIM(out) == PyArray_NDIM(frames) + 1 && PyArray_DIM(out, 0) == count &&
                   PyArray_DIM(out, 1) == of->n && PyArray_EquivTypes(PyArray_DESCR(out), PyArray_DESCR(frames)) &&
                   PyArray_SIZE(at) == count && PyArray_SIZE(ages) == count;
    for (int i = 1; is_known && i < PyArray_NDIM(frames); i++) {
        is_known = PyArray_DIM(frames, i) == PyArray_DIM(out, i + 1);
    }
    if (!is_known) {
        return 0;
    }
    *stacks = (Stacks){PyArray_DATA(at), PyArray_DATA(ages), PyArray_BYTES(out)};
    for (npy_intp i = 0; i < count; i++) {
        if (stacks->entry[i] < 0 || stacks->entry[i] >= of->size || stacks->age[i] < 0 ||
            stacks->age[i] * of->B > of->size) {
            PyErr_SetString(PyExc_IndexError, "an entry is not in the ring");
            return -1;
        }
    }
    return 1;
}

/* take_frames(frames, B, is_zero, at, age, out[, at, age, out]) */
PyObject *take_frames(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n_arguments) {
    if (n_arguments != 6 && n_arguments != 9) {
        return PyErr_Format(PyExc_TypeError, "expected 6 or 9 arguments, got %zd", n_arguments);
    }
    Py_ssize_t B = PyNumber_AsSsize_t(arguments[1], PyExc_IndexError);
    int is_zero = PyObject_IsTrue(arguments[2]), n_sets = (int)n_arguments / 3 - 1;
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyArrayObject *frames = (PyArrayObject *)arguments[0], *out = (PyArrayObject *)arguments[5];
    if (!PyArray_CheckExact(arguments[0]) || !PyArray_ISCARRAY(frames) || PyDataType_REFCHK(PyArray_DESCR(frames)) ||
        PyArray_NDIM(frames) < 1 || PyArray_SIZE(frames) == 0 || !PyArray_CheckExact(arguments[5]) ||
        PyArray_NDIM(out) < 2) {
        Py_RETURN_FALSE;
    }
    npy_intp size = PyArray_DIM(frames, 0), count = PyArray_DIM(out, 0);
    Frames of = {PyArray_BYTES(frames), size, PyArray_NBYTES(frames) / size, PyArray_DIM(out, 1), B, is_zero};
    Stacks sets[2];
    for (int s = 0; s < n_sets; s++) {
        int result = read_stacks(arguments + 3 * (s + 1), frames, &of, count, &sets[s]);
        if (result < 0) {
            return NULL;
        }
        if (!result) {
            Py_RETURN_FALSE;
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    /* One position after the other, so that frames which both stacks of a position have are loaded once. */
    const char *from = count ? frame_of(&sets[0], 0, 0, &of) : NULL;
    for (npy_intp i = 0; i < count; i++) {
        for (npy_intp j = 0; j < n_sets * of.n; j++) {
            int is_last = j == n_sets * of.n - 1;
            npy_intp next = is_last ? 0 : j + 1;
            const char *then = is_last && i == count - 1 ? NULL : frame_of(&sets[next / of.n], i + is_last, next % of.n, &of);
            /* The processor loads the next frame while it copies this one. */
            for (npy_intp line = 0; then != NULL && line < of.item && line < MOST_AHEAD; line += 64) {
                PREFETCH(then + line);
            }
            char *into = sets[j / of.n].out + (i * of.n + j % of.n) * of.item;
            if (from == NULL) {
                memset(into, 0, (size_t)of.item);
            } else {
                memcpy(into, from, (size_t)of.item);
            }
            from = then;
        }
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}
