/* Mutants of JPEGs through the region decoder, under sanitizers: jpeg_fuzz SEED COUNT FILE... */
#include "../../pycls_fast/data/jpeg_region.c"

static uint64_t state;
static uint32_t draw(uint32_t below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 33) % below;
}

int main(int argc, char **argv) {
  state = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
  long count = strtol(argv[2], NULL, 10), decoded = 0;
  for (long i = 0; i < count; i++) {
    FILE *file = fopen(argv[3 + draw(argc - 3)], "rb");
    fseek(file, 0, SEEK_END);
    size_t length = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(length);
    if (fread(data, 1, length, file) != length) return 3;
    fclose(file);
    for (uint32_t n = draw(6); n > 0; n--) data[draw((uint32_t)length)] = (uint8_t)(draw(3) ? draw(256) : 255);
    if (draw(4) == 0) {
      /* Of exactly this size, so that reading beyond the end is seen. */
      length = 1 + draw((uint32_t)length);
      data = realloc(data, length);
    }
    int32_t width = 0, height = 0;
    if (jpeg_size(data, length, &width, &height) == OK && width > 0 && height > 0 && (long)width * height < 1 << 20) {
      struct region r;
      r.height = 1 + (int32_t)draw(height), r.width = 1 + (int32_t)draw(width);
      r.top = (int32_t)draw(height - r.height + 1), r.left = (int32_t)draw(width - r.width + 1);
      r.resized_height = 1 + (int32_t)draw(64), r.resized_width = 1 + (int32_t)draw(64);
      r.out_height = 1 + (int32_t)draw(r.resized_height), r.out_width = 1 + (int32_t)draw(r.resized_width);
      r.out_top = (int32_t)draw(r.resized_height - r.out_height + 1);
      r.out_left = (int32_t)draw(r.resized_width - r.out_width + 1);
      r.bicubic = (int32_t)draw(2), r.mirror = (int32_t)draw(2), r.divisor = 1 << draw(4);
      uint8_t *out = malloc((size_t)r.out_height * r.out_width * 3);
      decoded += jpeg_region(data, length, &r, out) == OK;
      free(out);
    }
    free(data);
  }
  printf("%ld of %ld decoded\n", decoded, count);
  return 0;
}
