//! The values of the arguments. Errors describe the correct form.

use std::{num::NonZeroU32, time::Duration};

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::{
    Expr, ExprLit, ExprUnary, Lit, LitInt, LitStr, Path, Token, UnOp,
    ext::IdentExt as _,
    parse::{ParseStream, Parser as _},
    spanned::Spanned as _,
};

use crate::{
    key::{Key, Keys},
    runtime::located_at,
};

/// The shortest and the longest lease, equal to those of `LockSpec`.
const MIN_LEASE: Duration = Duration::from_millis(100);
const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
const MAX_MAX_HOLD: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// The shortest and the longest time for which a result is kept.
const MIN_KEEP: Duration = Duration::from_secs(1);
const MAX_KEEP: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// A value that is known at compile time, or an expression.
pub(crate) enum Value<T> {
    Literal(T),
    Expr(Given),
}

/// An expression of a given type, and the span of the argument's name.
pub(crate) struct Given {
    pub(crate) name: Span,
    pub(crate) expr: Expr,
}

impl Given {
    /// Expands to the value, with the type given at the span of the argument's name, so that a
    /// type error is reported there.
    ///
    /// If it were a plain function argument, an error would show that function to the user.
    pub(crate) fn value(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        quote_spanned!(Span::mixed_site()=> { let __value: #ty = #expr; __value })
    }

    /// Expands to a clone of the value. The expression is borrowed, and its temporaries live as
    /// long as in a call.
    pub(crate) fn cloned(&self, ty: impl FnOnce(Span) -> TokenStream) -> TokenStream {
        let (ty, expr) = (ty(located_at(self.name)), &self.expr);
        // The user's own span, so that errors point to the expression.
        let given = Ident::new("__given", expr.span());
        let reference = quote_spanned!(self.name=> &);
        quote_spanned! {Span::mixed_site()=>
            match &(#expr) {
                #given => {
                    let __value: #reference #ty = #given;
                    ::core::clone::Clone::clone(__value)
                }
            }
        }
    }
}

/// The return value for `Contended` and `WaitTimeout`.
pub(crate) enum OnBusy {
    /// The value for "nothing was done", with the span of the word.
    Skip(Span),
    Return(Expr),
}

/// Returns the literal of an expression, also if `macro_rules!` has wrapped it in a group.
pub(crate) fn literal(expr: &Expr) -> Option<&Lit> {
    match expr {
        Expr::Lit(ExprLit { lit, .. }) => Some(lit),
        Expr::Group(group) => literal(&group.expr),
        _ => None,
    }
}

/// Parses `key = ..` or `key(..)`.
pub(super) fn key(name: &Ident, input: ParseStream<'_>) -> syn::Result<Key> {
    if input.peek(syn::token::Paren) {
        let content;
        syn::parenthesized!(content in input);
        return Key::from_call(&content);
    }
    Key::from_value(expression(name, "key = \"order:{id}\"", input)?)
}

/// Parses `keys(.., ..)` or `keys = ..`.
pub(super) fn keys(name: &Ident, input: ParseStream<'_>) -> syn::Result<Keys> {
    if input.peek(syn::token::Paren) {
        let content;
        syn::parenthesized!(content in input);
        return Keys::from_call(name, &content);
    }
    let example = "keys(\"account:{from}\", \"account:{to}\")";
    let keys = expression(name, example, input)?;
    match literal(&keys) {
        None => Keys::from_value(keys),
        Some(text) => {
            let message =
                format!("`keys` takes several: write `{example}`, or `key = ..` for a single one");
            Err(syn::Error::new_spanned(text, message))
        }
    }
}

/// Parses `= expr`. `example` is the whole argument, for errors.
pub(super) fn expression(name: &Ident, example: &str, input: ParseStream<'_>) -> syn::Result<Expr> {
    equals(name, example, input)?;
    input.parse()
}

/// Parses the `=` before a value.
fn equals(name: &Ident, example: &str, input: ParseStream<'_>) -> syn::Result<()> {
    if input.peek(Token![=]) && !input.peek(Token![==]) {
        input.parse::<Token![=]>()?;
        if !input.is_empty() && !input.peek(Token![,]) {
            return Ok(());
        }
    }
    Err(syn::Error::new(
        name.span(),
        format!("`{name}` needs a value: write `{example}`"),
    ))
}

/// Parses the value of `client` or `spec`, which cannot be a literal.
pub(super) fn given(
    name: &Ident,
    example: &str,
    ty: &str,
    input: ParseStream<'_>,
) -> syn::Result<Given> {
    let expr = expression(name, example, input)?;
    match literal(&expr) {
        None => Ok(Given {
            name: name.span(),
            expr,
        }),
        Some(text) => Err(syn::Error::new_spanned(
            text,
            format!("`{name}` names a `{ty}` from elsewhere: write `{example}`"),
        )),
    }
}

pub(super) fn flag(name: &Ident, input: ParseStream<'_>) -> syn::Result<()> {
    if input.is_empty() || input.peek(Token![,]) {
        return Ok(());
    }
    Err(input.error(format!(
        "`{name}` takes no value: write `{name}` alone, or leave it out"
    )))
}

pub(super) fn duration(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<Duration>> {
    let value = expression(name, &format!("{name} = \"30s\""), input)?;
    let text = match literal(&value) {
        None => {
            return Ok(Value::Expr(Given {
                name: name.span(),
                expr: value,
            }));
        }
        Some(Lit::Str(text)) => text,
        Some(other) => {
            let message = format!(
                "a duration is a string with a unit, or an expression of type `Duration`: write `{name} = \"30s\"`"
            );
            return Err(syn::Error::new_spanned(other, message));
        }
    };
    let source = text.value();
    let complaint = match humantime::parse_duration(&source) {
        Ok(duration) => match out_of_range(name, duration) {
            None => return Ok(Value::Literal(duration)),
            Some(complaint) => complaint,
        },
        Err(error) => no_duration(source.trim(), &error),
    };
    Err(syn::Error::new(text.span(), complaint))
}

fn no_duration(source: &str, error: &humantime::DurationError) -> String {
    match error {
        humantime::DurationError::UnknownUnit { unit, .. } if unit.is_empty() => {
            format!(
                "\"{source}\" has no unit: write \"{source}s\" for seconds, or \"{source}ms\" for milliseconds"
            )
        }
        humantime::DurationError::UnknownUnit { unit, .. } => {
            format!(
                "\"{unit}\" is not a unit of time: write ms, s, m, h or d, as in \"30s\" or \"1m 30s\""
            )
        }
        _ => format!(
            "\"{source}\" is not a duration: write numbers and units, such as \"30s\" or \"1m 30s\""
        ),
    }
}

fn out_of_range(name: &Ident, duration: Duration) -> Option<String> {
    if name == "lease" && !(MIN_LEASE..=MAX_LEASE).contains(&duration) {
        return Some(
            "a lease is 100ms to 24h: it determines how fast a crash is noticed, and is renewed while the body runs".into(),
        );
    }
    if name == "once" {
        let is_kept = (MIN_KEEP..=MAX_KEEP).contains(&duration);
        return (!is_kept)
            .then(|| "a result is kept for 1s to 366days: write `once = \"48h\"`".into());
    }
    if name == "max_hold" {
        if duration > MAX_MAX_HOLD {
            return Some(
                "a `max_hold` is at most 365days: write less, or leave it out for no limit".into(),
            );
        }
        return duration
            .is_zero()
            .then(|| "a `max_hold` of zero holds nothing: leave it out for no limit".into());
    }
    (duration > MAX_LEASE).then(|| format!("a `{name}` is at most 24h: write less"))
}

pub(super) fn permits(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<NonZeroU32>> {
    const NONE: &str = "a lock needs at least one permit: write 1 or more";
    let wrong = "permits are a number, or an expression of type `NonZeroU32`: write `permits = 3`";
    number(
        name,
        "permits = 3",
        wrong,
        NONE,
        input,
        |number| match number.base10_parse().map(NonZeroU32::new) {
            Ok(Some(permits)) => Ok(permits),
            Ok(None) => Err(NONE),
            Err(_) => Err("too many permits: write at most 4294967295"),
        },
    )
}

pub(super) fn max_waiters(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<u64>> {
    let example = "max_waiters = 100";
    let wrong =
        "`max_waiters` is a number, or an expression of type `usize`: write `max_waiters = 100`";
    let negative = "`max_waiters` is 0 or more: write `max_waiters = 100`";
    number(name, example, wrong, negative, input, |number| {
        let too_many = "`max_waiters` is too large: leave it out for no limit";
        number.base10_parse().map_err(|_| too_many)
    })
}

/// Parses a number, or an expression. The other arguments are messages, for a literal of another
/// type and for a negative number.
fn number<T>(
    name: &Ident,
    example: &str,
    wrong: &str,
    negative: &str,
    input: ParseStream<'_>,
    parse: impl FnOnce(&LitInt) -> Result<T, &'static str>,
) -> syn::Result<Value<T>> {
    let value = expression(name, example, input)?;
    if let Expr::Unary(ExprUnary {
        op: UnOp::Neg(_), ..
    }) = value
    {
        return Err(syn::Error::new_spanned(value, negative));
    }
    match literal(&value) {
        None => Ok(Value::Expr(Given {
            name: name.span(),
            expr: value,
        })),
        Some(Lit::Int(number)) => parse(number)
            .map(Value::Literal)
            .map_err(|message| syn::Error::new(number.span(), message)),
        Some(other) => Err(syn::Error::new_spanned(other, wrong)),
    }
}

/// Parses the name of the lock in metrics, traces and errors.
pub(super) fn name(name: &Ident, input: ParseStream<'_>) -> syn::Result<LitStr> {
    equals(name, "name = \"checkout\"", input)?;
    let text: LitStr = input.parse()?;
    if text.value().is_empty() {
        let message =
            "a `name` is not empty: it labels metrics; leave it out for the path of the function";
        return Err(syn::Error::new(text.span(), message));
    }
    Ok(text)
}

/// Parses a name that the body can use.
pub(super) fn binding(name: &Ident, input: ParseStream<'_>) -> syn::Result<Ident> {
    equals(name, "held = lock", input)?;
    let expected =
        "the body needs a name for its lock: write `held = lock`, and use `lock.fence()` in it";
    let binding = input
        .parse::<Ident>()
        .map_err(|error| syn::Error::new(error.span(), expected))?;
    if input.is_empty() || input.peek(Token![,]) {
        Ok(binding)
    } else {
        Err(input.error(expected))
    }
}

pub(super) fn on_busy(name: &Ident, input: ParseStream<'_>) -> syn::Result<OnBusy> {
    let value = expression(name, "on_busy = skip", input)?;
    match (word(&value), literal(&value)) {
        (Some(word), _) if *word == "skip" => Ok(OnBusy::Skip(word.span())),
        (_, Some(Lit::Str(text))) if text.value() == "skip" => Err(syn::Error::new(
            text.span(),
            "`skip` is a word, not text: write `on_busy = skip`",
        )),
        _ => Ok(OnBusy::Return(value)),
    }
}

/// Parses `cancel`, `error` or `ignore`, or an expression that is no word. Returns the name of the
/// variant of `OnLost`.
pub(super) fn on_lost(name: &Ident, input: ParseStream<'_>) -> syn::Result<Value<&'static str>> {
    let value = expression(name, "on_lost = error", input)?;
    let variant = match (word(&value), literal(&value)) {
        (Some(word), _) if word == "cancel" => "Cancel",
        (Some(word), _) if word == "error" => "Error",
        (Some(word), _) if word == "ignore" => "Ignore",
        (None, None) => {
            return Ok(Value::Expr(Given {
                name: name.span(),
                expr: value,
            }));
        }
        _ => {
            let message = "write `on_lost = cancel` to stop the body when its lock is lost (the default), `on_lost = error` \
                           to let it run to its end and return `Lost`, `on_lost = ignore` to let it run to its end and \
                           return its result, or an expression of type `OnLost`";
            return Err(syn::Error::new_spanned(value, message));
        }
    };
    Ok(Value::Literal(variant))
}

/// Returns the expression if it is a single word.
fn word(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Path(path) if path.qself.is_none() => path.path.get_ident(),
        Expr::Group(group) => word(&group.expr),
        _ => None,
    }
}

pub(super) fn function(name: &Ident, input: ParseStream<'_>) -> syn::Result<Expr> {
    let example = "map_err = PayError::from_lock";
    let function = expression(name, example, input)?;
    match literal(&function) {
        None => Ok(function),
        Some(text) => {
            let message = format!(
                "`map_err` names a function from `LockError` to what this one returns: write `{example}`"
            );
            Err(syn::Error::new_spanned(text, message))
        }
    }
}

pub(super) fn path(name: &Ident, input: ParseStream<'_>) -> syn::Result<Path> {
    equals(name, "crate = my_crate::lock_runtime", input)?;
    if input.peek(LitStr) {
        let text: LitStr = input.parse()?;
        let path = Path::parse_mod_style.parse_str(&text.value());
        let path = path.map_or_else(|_| "my_crate::lock_runtime".to_owned(), |_| text.value());
        return Err(syn::Error::new(
            text.span(),
            format!("a path has no quotes: write `crate = {path}`"),
        ));
    }
    let expected =
        "`crate` names the crate lock-runtime by its path: write `crate = my_crate::lock_runtime`";
    if !input.peek(Ident::peek_any) && !input.peek(Token![::]) {
        return Err(input.error(expected));
    }
    input.call(Path::parse_mod_style)
}
