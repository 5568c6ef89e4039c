//! The expansion: the function as it was written, with its body behind a lock.
//!
//! Only attributes, visibility and signature are parsed. The body stays a run of tokens, so that code which is still being
//! typed does not break the attribute, and it stands in the output once.

use std::time::Duration;

use proc_macro2::{Delimiter, Group, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{
    Attribute, Ident, ReturnType, Signature, Token, Type, Visibility,
    ext::IdentExt as _,
    parse::{Parse, ParseStream},
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_pat_ident_mut, visit_type_mut},
};

use crate::{
    args::{Args, Mode, Value, Wait, located_at, nearest},
    key::Key,
};

/// The locked function; on any mistake the item as it was, beside the errors.
pub(crate) fn expand(args: TokenStream, item: TokenStream) -> TokenStream {
    let error = match (syn::parse2::<Function>(item.clone()), syn::parse2::<Args>(args)) {
        (Ok(function), Ok(args)) => match check_captures(&function.sig, &args.key) {
            Ok(()) => return function.locked(&args),
            Err(error) => error,
        },
        (Err(mut error), Err(more)) => {
            error.combine(more);
            error
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error,
    };
    // Without the item every use of it would be one more error, and an editor would not know it any longer.
    let error = error.into_compile_error();
    quote!(#item #error)
}

/// An `async fn` whose body nobody has looked into.
struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    sig: Signature,
    brace: Brace,
    inner_attrs: Vec<Attribute>,
    body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !begins_a_function(input) {
            return Err(input.error("`#[distributed_lock]` goes on an `async fn`: put it on a function or a method"));
        }
        let sig = input.parse()?;
        check(&sig)?;
        if input.peek(Token![;]) {
            return Err(
                input.error("there is no body here to lock: put `#[distributed_lock]` on the method that has it")
            );
        }
        let content;
        let brace = syn::braced!(content in input);
        Ok(Self { attrs, vis, sig, brace, inner_attrs: content.call(Attribute::parse_inner)?, body: content.parse()? })
    }
}

/// Is there an `fn` ahead, with nothing before it but `const`, `async`, `unsafe`, `extern "C"`?
fn begins_a_function(input: ParseStream<'_>) -> bool {
    let ahead = input.fork();
    while ahead.peek(Ident::peek_any) || ahead.peek(syn::LitStr) {
        if ahead.peek(Token![fn]) {
            return true;
        }
        if ahead.parse::<proc_macro2::TokenTree>().is_err() {
            break;
        }
    }
    false
}

/// Refuses functions that cannot wait for a lock, or cannot say that they did not get it.
fn check(sig: &Signature) -> syn::Result<()> {
    if let Some(constness) = &sig.constness {
        return Err(syn::Error::new(constness.span, "a `const fn` cannot wait for a lock: make it an `async fn`"));
    }
    if sig.asyncness.is_none() {
        let name = &sig.ident;
        let message = if returns_boxed_future(sig) {
            format!(
                "`{name}` is no `async fn` (`#[async_trait]` turns its methods into plain ones): put the work into an \
                 `async fn` of its own with `#[distributed_lock]` on it, and call that one from here"
            )
        } else {
            format!("waiting for a lock is asynchronous: write `async fn {name}`")
        };
        return Err(syn::Error::new(sig.fn_token.span, message));
    }
    if let ReturnType::Type(_, ty) = &sig.output
        && let Type::Never(_) = **ty
    {
        let message = "a function that never returns cannot report that the lock was lost: return a `Result` with \
                       `std::convert::Infallible` in its `Ok`";
        return Err(syn::Error::new(ty.span(), message));
    }
    Ok(())
}

/// `Pin<Box<dyn Future<..>>>`, by its words alone: an alias or a path changes nothing about the advice.
fn returns_boxed_future(sig: &Signature) -> bool {
    let ReturnType::Type(_, ty) = &sig.output else { return false };
    let words = ty.to_token_stream().to_string();
    words.contains("Box") && words.contains("Future")
}

/// Refuses a key that captures what is no argument.
///
/// The compiler would refuse it too, but it cannot look into a string that was taken apart: it would propose to replace the
/// whole key by the variable that was meant. A capital letter may begin a constant, which is the compiler's to know.
fn check_captures(sig: &Signature, key: &Key) -> syn::Result<()> {
    let mut arguments = Bindings::default();
    arguments.visit_signature_mut(&mut sig.clone());
    let missing = key.captures().find(|(name, _)| {
        name.starts_with(|first: char| first.is_lowercase() || first == '_')
            && !arguments.names.iter().any(|n| n == name)
    });
    match missing {
        Some((name, span)) if !arguments.hidden => {
            let hint = match nearest(name, arguments.names.iter().map(String::as_str)) {
                Some(near) => format!("did you mean `{{{near}}}`?"),
                None => "a key is made of what the function is called with, or of constants".to_owned(),
            };
            Err(syn::Error::new(span, format!("`{}` has no argument `{name}`: {hint}", sig.ident)))
        }
        _ => Ok(()),
    }
}

/// The names that the arguments of a function bind.
#[derive(Default)]
struct Bindings {
    names: Vec<String>,
    /// A macro stands for a pattern: there may be more names.
    hidden: bool,
}

impl VisitMut for Bindings {
    fn visit_pat_ident_mut(&mut self, pat: &mut syn::PatIdent) {
        self.names.push(pat.ident.unraw().to_string());
        visit_pat_ident_mut(self, pat);
    }

    fn visit_receiver_mut(&mut self, _: &mut syn::Receiver) {
        self.names.push("self".to_owned());
    }

    fn visit_macro_mut(&mut self, _: &mut syn::Macro) {
        self.hidden = true;
    }
}

impl Function {
    fn locked(self, args: &Args) -> TokenStream {
        let span = Span::mixed_site();
        let rt = runtime(span);
        let Self { attrs, vis, sig, brace, inner_attrs, body } = self;

        let client = match &args.client {
            None => quote_spanned!(span=> #rt::ambient()),
            Some(client) => {
                let span = located_at(client.span());
                let rt = runtime(span);
                quote_spanned!(span=> #rt::client(&(#client)))
            }
        };
        let key = args.key.expand(runtime);
        let spec = spec(args, &rt);
        let anchor = return_type_anchor(&sig);
        let refused = from_lock_error(&sig);
        // The user's line, but not the user's braces: the compiler would call them unnecessary.
        let mut block = Group::new(Delimiter::Brace, body);
        block.set_span(located_at(brace.span.join()));

        // Client, key and spec are done with before the body captures its variables: `client = self.locks` borrows from
        // what the body may move. The body is not handed to an async function, whose future would hold it twice.
        let mut outer = TokenStream::new();
        brace.surround(&mut outer, |outer| {
            outer.extend(quote_spanned! {span=>
                #(#inner_attrs)*
                let __client = #client;
                let __key = #key;
                let __spec = #spec;
                let __outcome = match #rt::enter(__client, __key, __spec).await {
                    ::core::result::Result::Ok(__entered) => {
                        __entered.cancel_on_loss(async move { #anchor #block }).await
                    }
                    ::core::result::Result::Err(__error) => ::core::result::Result::Err(__error),
                };
                match __outcome {
                    ::core::result::Result::Ok(__returned) => __returned,
                    ::core::result::Result::Err(__error) => #refused,
                }
            });
        });
        quote!(#(#attrs)* #vis #sig #outer)
    }
}

/// The path to the runtime, where every path of the expansion starts. Whoever renames lock-runtime cannot use the
/// attribute yet.
fn runtime(span: Span) -> TokenStream {
    quote_spanned!(span=> ::lock_runtime::__rt)
}

/// Turns `__error` into what the function returns.
fn from_lock_error(sig: &Signature) -> TokenStream {
    let (start, end) = match &sig.output {
        ReturnType::Default => (sig.ident.span(), sig.ident.span()),
        ReturnType::Type(_, ty) => ends(ty),
    };
    // The user's own spans, first token and last: a type that cannot hold the error is underlined, and nothing else.
    let rt = runtime(start);
    let error = Ident::new("__error", Span::mixed_site());
    let mut call = quote_spanned!(start=> #rt::FromLockError::);
    call.extend(quote_spanned!(end=> from_lock_error(#error)));
    call
}

/// The spans of the first and the last token. The compiler joins what a stable macro cannot.
fn ends(tokens: &impl ToTokens) -> (Span, Span) {
    let mut spans = tokens.to_token_stream().into_iter().map(|token| token.span());
    let start = spans.next().unwrap_or_else(Span::call_site);
    (start, spans.last().unwrap_or(start))
}

/// A reference to the spec, to a constant if it can be one.
fn spec(args: &Args, rt: &TokenStream) -> TokenStream {
    let span = Span::mixed_site();
    let mut constant = true;
    let mut spec = match &args.mode {
        Mode::Exclusive => quote_spanned!(span=> #rt::LockSpec::exclusive()),
        Mode::Shared => quote_spanned!(span=> #rt::LockSpec::shared()),
        Mode::Permits(permits) => {
            let permits = match permits {
                // n as 1 + (n - 1): no `unwrap` in code that is not ours.
                Value::Literal(permits) => {
                    let more = permits.get() - 1;
                    quote_spanned!(span=> ::core::num::NonZeroU32::MIN.saturating_add(#more))
                }
                Value::Expr(expr) => {
                    constant = false;
                    quote!(#expr)
                }
            };
            quote_spanned!(span=> #rt::LockSpec::permits(#permits))
        }
    };
    let mut set = |setter: &str, value: Option<&Value<Duration>>| {
        let (span, value) = match value {
            None => (span, TokenStream::new()),
            Some(Value::Literal(duration)) => {
                let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                (span, quote_spanned!(span=> ::core::time::Duration::new(#secs, #nanos)))
            }
            Some(Value::Expr(expr)) => {
                constant = false;
                (located_at(expr.span()), expr.to_token_stream())
            }
        };
        let setter = Ident::new(setter, span);
        spec.extend(quote_spanned!(span=> .#setter(#value)));
    };
    if let Some(lease) = &args.lease {
        set("lease", Some(lease));
    }
    match &args.wait {
        None => {}
        Some(Wait::No) => set("no_wait", None),
        Some(Wait::AtMost(wait)) => set("wait", Some(wait)),
    }
    if args.reentrant {
        set("reentrant", None);
    }
    if let Some(min_hold) = &args.min_hold {
        set("min_hold", Some(min_hold));
    }
    if let Some(max_hold) = &args.max_hold {
        set("max_hold", Some(max_hold));
    }
    // Eight bytes instead of a spec in the future, and no name that the body could see.
    if constant { quote_spanned!(span=> const { &#spec }) } else { quote_spanned!(span=> &#spec) }
}

/// A `return` that never runs: the first one that the compiler sees, so that the body is held to the declared type and
/// its errors stand where they stand without the attribute.
fn return_type_anchor(sig: &Signature) -> TokenStream {
    let (span, mut ty) = match &sig.output {
        ReturnType::Default => (sig.ident.span(), syn::parse_quote!(())),
        ReturnType::Type(_, ty) => (ty.span(), (**ty).clone()),
    };
    let span = located_at(span);
    InferImplTrait.visit_type_mut(&mut ty);
    quote_spanned! {span=>
        #[allow(
            unreachable_code,
            clippy::diverging_sub_expression,
            clippy::empty_loop,
            clippy::let_unit_value,
            clippy::let_with_type_underscore,
            clippy::needless_return,
        )]
        if false {
            let __returned: #ty = loop {};
            return __returned;
        }
    }
}

/// `impl Trait` stands in no `let`; `_` leaves it to the body.
struct InferImplTrait;

impl VisitMut for InferImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if let Type::ImplTrait(_) = ty {
            *ty = syn::parse_quote!(_);
        } else {
            visit_type_mut(self, ty);
        }
    }
}

#[cfg(test)]
mod tests;
