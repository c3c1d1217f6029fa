/* Decode the part of a JPEG that a crop needs, and resize it, in one pass over its rows.
 *
 * The pixels are those of Pillow: the whole image decoded by libjpeg-turbo, cropped, resized, cropped again.
 * - Entropy decoding ends with the last row that is needed; rows above the first and blocks beside the crop get no
 *   inverse DCT, upsampling or color conversion (jpeg_skip_scanlines, jpeg_crop_scanline).
 * - The resampling is Pillow's arithmetic: coefficients in double, rounded to 22 fractional bits, rows before columns,
 *   8 bits between the two. Only what the output window needs is computed.
 * - With a divisor of 2, 4 or 8, libjpeg's inverse DCT decodes at that fraction, and the rest is resampled: the pixels
 *   are then those of Pillow's draft mode.
 *
 * Whatever is unusual (other color spaces, warnings, markers out of place, no end marker) is left to the caller's
 * reference decoder, so that both judge damaged files alike.
 */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#ifndef LIBJPEG_TURBO_VERSION
#error "libjpeg-turbo is needed; this jpeglib.h is from a different library"
#endif

enum { OK = 0, ASK_REFERENCE = 1, NO_MEMORY = 2 };
enum { FRACTION_BITS = 22, ROW_BLOCK = 64 };

/* Two RGBX pixels at a time. (Four, on processors with vectors of 512 bits, were slower.) */
enum { LANES = 8, PIXELS = LANES / 4 };
typedef int32_t int32_lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t int32_4 __attribute__((vector_size(16)));

/* ---- the source and the errors of libjpeg ---- */

struct errors {
  struct jpeg_error_mgr base;
  jmp_buf leave;
};

static void on_error(j_common_ptr info) { longjmp(((struct errors *)info->err)->leave, 1); }

static void on_message(j_common_ptr info, int level) {
  if (level < 0) info->err->num_warnings++;
}

static int is_supported(const struct jpeg_decompress_struct *jpeg) {
  if (jpeg->data_precision != 8) return 0;
  switch (jpeg->jpeg_color_space) {
    case JCS_GRAYSCALE:
      return jpeg->num_components == 1;
    case JCS_YCbCr:
    case JCS_RGB:
      return jpeg->num_components == 3;
    default:
      return 0;
  }
}

/* Whether the rest of the scan runs to the end marker with nothing but entropy-coded data in between. */
static int ends_well(const uint8_t *data, const uint8_t *end) {
  while (data < end) {
    const uint8_t *mark = memchr(data, 0xFF, (size_t)(end - data));
    if (mark == NULL || mark + 1 >= end) return 0;
    if (mark[1] == 0xD9) return 1;
    if (mark[1] == 0xFF)
      data = mark + 1;
    else if (mark[1] == 0x00 || (mark[1] >= 0xD0 && mark[1] <= 0xD7))
      data = mark + 2;
    else
      return 0;
  }
  return 0;
}

/* ---- resampling coefficients ---- */

struct kernel {
  int taps;       /* coefficients kept for each output pixel, the unused ones 0 */
  int *first;     /* the first input pixel of each */
  int *count;     /* how many of `taps` are used */
  int32_t *value; /* [output][taps] */
};

static double triangle(double x) {
  x = fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

static double cubic(double x) {
  const double a = -0.5;
  x = fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

static void free_kernel(struct kernel *kernel) {
  free(kernel->first);
  free(kernel->count);
  free(kernel->value);
}

/* Output pixels start .. start + count - 1 of `extent` pixels, from `offset` on among `input` pixels, resized to
 * `output`. */
static int make_kernel(struct kernel *kernel, int input, double offset, double extent, int output, int start, int count,
                       int bicubic) {
  double (*filter)(double) = bicubic ? cubic : triangle;
  double scale = extent / output;
  double stretch = scale < 1.0 ? 1.0 : scale;
  double support = (bicubic ? 2.0 : 1.0) * stretch;
  int taps = ((int)ceil(support) * 2 + PIXELS) / PIXELS * PIXELS;
  double *weights = malloc(sizeof(double) * (size_t)taps);
  kernel->taps = taps;
  kernel->first = malloc(sizeof(int) * (size_t)count);
  kernel->count = malloc(sizeof(int) * (size_t)count);
  kernel->value = calloc((size_t)count * (size_t)taps, sizeof(int32_t));
  if (!weights || !kernel->first || !kernel->count || !kernel->value) {
    free(weights);
    return NO_MEMORY;
  }
  for (int i = 0; i < count; i++) {
    double center = offset + (start + i + 0.5) * scale;
    int low = (int)(center - support + 0.5);
    int high = (int)(center + support + 0.5);
    double sum = 0.0;
    if (low < 0) low = 0;
    if (high > input) high = input;
    for (int x = low; x < high; x++) {
      weights[x - low] = filter((x - center + 0.5) * (1.0 / stretch));
      sum += weights[x - low];
    }
    for (int x = 0; x < high - low; x++) {
      double weight = sum != 0.0 ? weights[x] / sum : weights[x];
      kernel->value[(size_t)i * taps + x] =
          (int32_t)((weight < 0 ? -0.5 : 0.5) + weight * (double)(1 << FRACTION_BITS));
    }
    kernel->first[i] = low;
    kernel->count[i] = high - low;
  }
  free(weights);
  return OK;
}

static inline int32_t to_8_bits(int32_t sum) {
  sum >>= FRACTION_BITS;
  return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

/* One row of RGBX pixels, already 32 bits wide, resized; `mirror` writes it from right to left. Reads a few numbers past
 * the row's end. `sums`: room for `count` pixels. */
static void resize_row(const int32_t *row, uint8_t *out, const struct kernel *kernel, const int32_t *spread_values,
                       int32_t *sums, int count, int mirror) {
  const int32_t half = 1 << (FRACTION_BITS - 1);
  for (int i = 0; i < count; i++) {
    const int32_t *pixels = row + (size_t)kernel->first[i] * 4;
    const int32_t *values = spread_values + (size_t)i * (size_t)kernel->taps * 4;
    int32_lanes sum = {half, half, half, half};
    for (int x = 0; x < kernel->count[i]; x += PIXELS) {
      int32_lanes pixel, value;
      memcpy(&pixel, pixels + (size_t)x * 4, sizeof pixel);
      memcpy(&value, values + (size_t)x * 4, sizeof value);
      sum += pixel * value;
    }
    int32_4 part[PIXELS];
    memcpy(part, &sum, sizeof sum);
    int32_4 total = part[0];
    for (int p = 1; p < PIXELS; p++) total += part[p];
    memcpy(sums + (size_t)(mirror ? count - 1 - i : i) * 4, &total, sizeof total);
  }
  for (int i = 0; i < count * 4; i++) out[i] = (uint8_t)to_8_bits(sums[i]);
}

/* One output row of RGB from `rows` rows of RGBX. */
static void mix_rows(const uint8_t *rows, size_t stride, const int32_t *values, int taps, int count, uint8_t *out) {
  const int bytes = count * 4;
  for (int start = 0; start < bytes; start += ROW_BLOCK) {
    int32_t sum[ROW_BLOCK];
    uint8_t result[ROW_BLOCK];
    /* The rows have a block's slack at their end, so that every block is whole. */
    for (int i = 0; i < ROW_BLOCK; i++) sum[i] = 1 << (FRACTION_BITS - 1);
    for (int y = 0; y < taps; y++) {
      const uint8_t *row = rows + (size_t)y * stride + start;
      const int32_t value = values[y];
      for (int i = 0; i < ROW_BLOCK; i++) sum[i] += row[i] * value;
    }
    for (int i = 0; i < ROW_BLOCK; i++) result[i] = (uint8_t)to_8_bits(sum[i]);
    const int pixels = (bytes - start < ROW_BLOCK ? bytes - start : ROW_BLOCK) / 4;
    for (int i = 0; i < pixels; i++) {
      out[0] = result[4 * i];
      out[1] = result[4 * i + 1];
      out[2] = result[4 * i + 2];
      out += 3;
    }
  }
}

/* ---- rows in, the window out ---- */

struct region {
  int32_t top, left, height, width;                     /* the part of the image, in pixels */
  int32_t resized_height, resized_width;                /* what it is resized to */
  int32_t out_top, out_left, out_height, out_width;     /* the part of that to keep */
  int32_t bicubic, mirror;
  int32_t divisor;                                      /* the image is decoded at 1 / divisor: 1, 2, 4 or 8 */
};

struct resizer {
  const struct region *region;
  struct kernel columns, rows;
  int32_t *values, *sums, *wide;
  uint8_t *narrow;
  size_t stride;
  int left, top, width, height; /* the whole pixels of the decoded image that the region touches */
  int x0, x1, y0, y1;           /* columns and rows of these that the window needs */
};

/* Each coefficient once per channel, as `resize_row` multiplies them. */
static int32_t *spread(const struct kernel *kernel, int count) {
  const size_t values = (size_t)count * (size_t)kernel->taps;
  int32_t *result = malloc(values * 4 * sizeof(int32_t));
  if (result != NULL)
    for (size_t i = 0; i < values * 4; i++) result[i] = kernel->value[i / 4];
  return result;
}

static void free_resizer(struct resizer *resizer) {
  free_kernel(&resizer->columns);
  free_kernel(&resizer->rows);
  free(resizer->values);
  free(resizer->sums);
  free(resizer->wide);
  free(resizer->narrow);
}

static int make_resizer(struct resizer *resizer, const struct region *region) {
  const int out_width = region->out_width, out_height = region->out_height;
  const int divisor = region->divisor;
  const double part = 1.0 / divisor; /* exact, and so is what is multiplied by it */
  memset(resizer, 0, sizeof *resizer);
  resizer->region = region;
  resizer->left = region->left / divisor;
  resizer->top = region->top / divisor;
  resizer->width = (region->left + region->width + divisor - 1) / divisor - resizer->left;
  resizer->height = (region->top + region->height + divisor - 1) / divisor - resizer->top;
  if (make_kernel(&resizer->columns, resizer->width, region->left * part - resizer->left, region->width * part,
                  region->resized_width, region->out_left, out_width, region->bicubic) != OK ||
      make_kernel(&resizer->rows, resizer->height, region->top * part - resizer->top, region->height * part,
                  region->resized_height, region->out_top, out_height, region->bicubic) != OK)
    return NO_MEMORY;
  const struct kernel *columns = &resizer->columns, *rows = &resizer->rows;
  resizer->x0 = columns->first[0];
  resizer->x1 = columns->first[out_width - 1] + columns->count[out_width - 1];
  resizer->y0 = rows->first[0];
  resizer->y1 = rows->first[out_height - 1] + rows->count[out_height - 1];
  resizer->stride = (size_t)out_width * 4 + ROW_BLOCK;
  resizer->values = spread(columns, out_width);
  resizer->sums = malloc((size_t)out_width * 4 * sizeof(int32_t));
  resizer->wide = calloc((size_t)resizer->width * 4 + LANES, sizeof(int32_t));
  resizer->narrow = calloc((size_t)(resizer->y1 - resizer->y0), resizer->stride);
  return resizer->values && resizer->sums && resizer->wide && resizer->narrow ? OK : NO_MEMORY;
}

/* `resizer->wide` holds row `y` of the pixels that the region touches. */
static void add_row(struct resizer *resizer, int y) {
  resize_row(resizer->wide, resizer->narrow + (size_t)(y - resizer->y0) * resizer->stride, &resizer->columns,
             resizer->values, resizer->sums, resizer->region->out_width, resizer->region->mirror);
}

static void finish(const struct resizer *resizer, uint8_t *out) {
  const struct kernel *rows = &resizer->rows;
  const int width = resizer->region->out_width;
  for (int i = 0; i < resizer->region->out_height; i++)
    mix_rows(resizer->narrow + (size_t)(rows->first[i] - resizer->y0) * resizer->stride, resizer->stride,
             rows->value + (size_t)i * rows->taps, rows->count[i], width, out + (size_t)i * width * 3);
}

/* ---- what Python calls ---- */

/* Width and height of a JPEG that `jpeg_region` can decode. */
int jpeg_size(const uint8_t *data, size_t length, int32_t *width, int32_t *height) {
  struct jpeg_decompress_struct jpeg;
  struct errors errors;
  jpeg.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  errors.base.emit_message = on_message;
  if (setjmp(errors.leave)) {
    jpeg_destroy_decompress(&jpeg);
    return ASK_REFERENCE;
  }
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, (unsigned char *)data, length);
  jpeg_read_header(&jpeg, TRUE);
  *width = (int32_t)jpeg.image_width;
  *height = (int32_t)jpeg.image_height;
  int supported = is_supported(&jpeg) && errors.base.num_warnings == 0;
  jpeg_destroy_decompress(&jpeg);
  return supported ? OK : ASK_REFERENCE;
}

/* `out`: out_height x out_width x 3 bytes. The region must lie within the image, the window within the resized. */
int jpeg_region(const uint8_t *data, size_t length, const struct region *region, uint8_t *out) {
  struct jpeg_decompress_struct jpeg;
  struct errors errors;
  struct resizer resizer;
  uint8_t *volatile line = NULL;
  volatile int status = NO_MEMORY;

  jpeg.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  errors.base.emit_message = on_message;
  jpeg_create_decompress(&jpeg);
  if (make_resizer(&resizer, region) != OK) goto done;
  if (setjmp(errors.leave)) {
    status = ASK_REFERENCE;
    goto done;
  }
  jpeg_mem_src(&jpeg, (unsigned char *)data, length);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = JCS_EXT_RGBX;
  jpeg.scale_num = 1;
  jpeg.scale_denom = (unsigned int)region->divisor;
  jpeg_start_decompress(&jpeg);

  /* Chroma at the edges of what is decoded lacks the neighbors that upsampling looks at: decode a block more. */
  const int margin = jpeg.max_h_samp_factor > 1 ? 8 * jpeg.max_h_samp_factor : 0;
  int begin = resizer.left + resizer.x0 - margin, stop = resizer.left + resizer.x1 + margin;
  if (begin < 0) begin = 0;
  if (stop > (int)jpeg.output_width) stop = (int)jpeg.output_width;
  JDIMENSION offset = (JDIMENSION)begin, width = (JDIMENSION)(stop - begin);
  if (offset > 0 || width < jpeg.output_width) jpeg_crop_scanline(&jpeg, &offset, &width);

  line = malloc((size_t)width * 4 + 64);
  if (line == NULL) goto done;
  /* libjpeg-turbo's writes to aligned rows bypass the cache, and the rows would have to be fetched again. */
  uint8_t *const odd_line = line + 4 + (32 - (uintptr_t)line % 32) % 32;
  const uint8_t *const needed = odd_line + ((size_t)(resizer.left + resizer.x0) - offset) * 4;
  const JDIMENSION first = (JDIMENSION)(resizer.top + resizer.y0);
  if (first > 0 && jpeg_skip_scanlines(&jpeg, first) != first) {
    status = ASK_REFERENCE;
    goto done;
  }
  for (int y = resizer.y0; y < resizer.y1; y++) {
    JSAMPROW target = odd_line;
    if (jpeg_read_scanlines(&jpeg, &target, 1) != 1) {
      status = ASK_REFERENCE;
      goto done;
    }
    int32_t *const wide = resizer.wide + (size_t)resizer.x0 * 4;
    for (int i = 0; i < (resizer.x1 - resizer.x0) * 4; i++) wide[i] = needed[i];
    add_row(&resizer, y);
  }
  /* The entropy decoder may have met the next marker already. */
  const int marker = jpeg.unread_marker;
  const int goes_on = marker == 0 || (marker >= JPEG_RST0 && marker <= JPEG_RST0 + 7);
  const int whole = jpeg_has_multiple_scans(&jpeg) || marker == JPEG_EOI ||
                    (goes_on && ends_well(jpeg.src->next_input_byte, data + length));
  if (errors.base.num_warnings > 0 || !whole) {
    status = ASK_REFERENCE;
    goto done;
  }
  finish(&resizer, out);
  status = OK;

done:
  jpeg_destroy_decompress(&jpeg);
  free_resizer(&resizer);
  free(line);
  return status;
}

/* `jpeg_region` for decoded pixels: rows of `image_width` RGB triples without gaps. */
int array_region(const uint8_t *pixels, int32_t image_width, const struct region *region, uint8_t *out) {
  struct resizer resizer;
  const int status = make_resizer(&resizer, region);
  if (status == OK) {
    for (int y = resizer.y0; y < resizer.y1; y++) {
      const uint8_t *row =
          pixels + ((size_t)(region->top + y) * image_width + (size_t)(region->left + resizer.x0)) * 3;
      int32_t *const wide = resizer.wide + (size_t)resizer.x0 * 4;
      for (int x = 0; x < resizer.x1 - resizer.x0; x++) {
        wide[4 * x] = row[3 * x];
        wide[4 * x + 1] = row[3 * x + 1];
        wide[4 * x + 2] = row[3 * x + 2];
      }
      add_row(&resizer, y);
    }
    finish(&resizer, out);
  }
  free_resizer(&resizer);
  return status;
}
