/* A security key of OpenSSH in software: it signs once the file TOUCH is there. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API_VERSION 0x000a0000
#define ED25519 1087

/* Of libcrypto, which the program that loads this library has in memory. */
void *EVP_PKEY_new_raw_private_key(int, void *, const uint8_t *, size_t);
int EVP_PKEY_get_raw_public_key(void *, uint8_t *, size_t *);
void *EVP_MD_CTX_new(void);
int EVP_DigestSignInit(void *, void *, void *, void *, void *);
int EVP_DigestSign(void *, uint8_t *, size_t *, const uint8_t *, size_t);
uint8_t *SHA256(const uint8_t *, size_t, uint8_t *);

struct enrolled {
    uint8_t flags;
    uint8_t *public_key;
    size_t public_key_len;
    uint8_t *key_handle;
    size_t key_handle_len;
    uint8_t *signature;
    size_t signature_len;
    uint8_t *certificate;
    size_t certificate_len;
    uint8_t *authdata;
    size_t authdata_len;
};

struct signature {
    uint8_t flags;
    uint32_t counter;
    uint8_t *r;
    size_t r_len;
    uint8_t *s;
    size_t s_len;
};

static void *key(void)
{
    static const uint8_t seed[32];
    return EVP_PKEY_new_raw_private_key(ED25519, NULL, seed, sizeof seed);
}

uint32_t sk_api_version(void)
{
    return API_VERSION;
}

int sk_enroll(uint32_t alg, const uint8_t *challenge, size_t challenge_len,
              const char *application, uint8_t flags, const char *pin, void **options,
              struct enrolled **response)
{
    struct enrolled *made = calloc(1, sizeof *made);
    made->flags = flags;
    made->public_key_len = 32;
    made->public_key = malloc(made->public_key_len);
    EVP_PKEY_get_raw_public_key(key(), made->public_key, &made->public_key_len);
    made->key_handle_len = 1;
    made->key_handle = calloc(1, made->key_handle_len);
    made->signature_len = 64;
    made->signature = calloc(1, made->signature_len);
    *response = made;
    return 0;
}

int sk_sign(uint32_t alg, const uint8_t *data, size_t data_len, const char *application,
            const uint8_t *key_handle, size_t key_handle_len, uint8_t flags, const char *pin,
            void **options, struct signature **response)
{
    /* The hash of the application, the flags, a counter of 1 and the hash of the data. */
    uint8_t message[32 + 1 + 4 + 32] = {0};
    struct signature *made = calloc(1, sizeof *made);
    void *context = EVP_MD_CTX_new();

    while (access(TOUCH, F_OK))
        usleep(20000);
    SHA256((const uint8_t *)application, strlen(application), message);
    message[32] = flags;
    message[36] = 1;
    SHA256(data, data_len, message + 37);
    made->flags = flags;
    made->counter = 1;
    made->r_len = 64;
    made->r = malloc(made->r_len);
    EVP_DigestSignInit(context, NULL, NULL, NULL, key());
    EVP_DigestSign(context, made->r, &made->r_len, message, sizeof message);
    *response = made;
    return 0;
}

int sk_load_resident_keys(const char *pin, void **options, void ***keys, size_t *count)
{
    *count = 0;
    return 0;
}
