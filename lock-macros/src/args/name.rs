//! The names of the arguments, and suggestions for unknown names.

use syn::{Ident, Lit, LitStr, Token, parse::ParseStream};

/// All arguments, in the order of the documentation.
pub(super) const KNOWN: [&str; 29] = [
    "key",
    "keys",
    "global",
    "name",
    "lease",
    "wait",
    "no_wait",
    "reentrant",
    "no_reentrant",
    "exclusive",
    "shared",
    "permits",
    "min_hold",
    "max_hold",
    "no_max_hold",
    "renew",
    "no_renew",
    "strict_order",
    "no_strict_order",
    "retain",
    "max_waiters",
    "once",
    "spec",
    "client",
    "held",
    "on_busy",
    "on_lost",
    "map_err",
    "crate",
];

/// The modes that have no value.
const MODES: [&str; 2] = ["exclusive", "shared"];

/// Names of the same arguments in other libraries.
const ALIASES: [(&str, &str); 16] = [
    ("id", "key"),
    ("ttl", "lease"),
    ("expiry", "lease"),
    ("timeout", "wait"),
    ("acquire_timeout", "wait"),
    ("try_lock", "no_wait"),
    ("read", "shared"),
    ("write", "exclusive"),
    ("semaphore", "permits"),
    ("lock_at_most_for", "max_hold"),
    ("lock_at_least_for", "min_hold"),
    ("fair", "strict_order"),
    ("constant", "global"),
    ("guard", "held"),
    ("locks", "client"),
    ("skip", "on_busy"),
];

/// Returns the argument that was probably meant by the unknown `name`. `input` is the text after
/// it.
pub(super) fn meant(name: &Ident, input: ParseStream<'_>) -> Option<&'static str> {
    let text = name.to_string();
    // A word without a value is not a key.
    let is_flag = input.is_empty() || input.peek(Token![,]);
    let alias = ALIASES
        .iter()
        .find(|(alias, known)| *alias == text && !(is_flag && *known == "key"));
    alias
        .map(|(_, known)| *known)
        .or_else(|| nearest(&text, KNOWN))
        .filter(|known| !is_flag || *known != "key")
}

pub(super) fn unknown(
    name: &Ident,
    meant: Option<&'static str>,
    has_key: bool,
    input: ParseStream<'_>,
) -> syn::Error {
    let text = name.to_string();
    let is_flag = input.is_empty() || input.peek(Token![,]);
    let hint = match meant {
        // As in policy files.
        _ if text == "mode" => match mode(input) {
            Some(mode) => format!("write `{mode}`, without `mode`"),
            None => "write `exclusive`, `shared` or `permits = n`, without `mode`".to_owned(),
        },
        _ if input.peek(Token![-]) => "names are written with `_`, as in `no_wait`".to_owned(),
        Some(known) => format!("did you mean `{known}`?"),
        None if has_key && is_flag => {
            format!("if it belongs into the key, write `key(\"order:{{}}\", {text})`")
        }
        None => format!("the arguments are {}", KNOWN.join(", ")),
    };
    syn::Error::new(
        name.span(),
        format!("there is no argument `{text}`: {hint}"),
    )
}

/// Returns the mode in `= "shared"` or `= shared`.
fn mode(input: ParseStream<'_>) -> Option<String> {
    let ahead = input.fork();
    ahead.parse::<Token![=]>().ok()?;
    let word = match ahead.parse::<Option<LitStr>>().ok()? {
        Some(text) => text.value(),
        None => ahead.parse::<Ident>().ok()?.to_string(),
    };
    MODES.contains(&&*word).then_some(word)
}

/// The error for an argument without a name, mostly a key written as in other libraries.
pub(super) fn missing(input: ParseStream<'_>) -> syn::Error {
    match input.parse::<Lit>() {
        Ok(Lit::Str(text)) => syn::Error::new(
            text.span(),
            format!(
                "every argument has a name: write `key = {:?}`",
                text.value()
            ),
        ),
        _ => input.error("expected an argument such as `key = \"order:{id}\"`"),
    }
}

/// Returns the word that was probably meant.
pub(crate) fn nearest<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, near) = words
        .into_iter()
        .map(|other| (strsim::damerau_levenshtein(word, other), other))
        .min()?;
    // With half of the letters different, it is another word.
    (distance * 2 < word.len()).then_some(near)
}
