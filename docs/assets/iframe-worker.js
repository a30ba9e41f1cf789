// Search works in pages opened from a folder, too: browsers start no Worker from file://, so its script runs in a hidden
// frame. Used by mkdocs-material's plugin `offline`, whose own shim comes from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.onmessage?.(event);
        this.dispatchEvent(event);
      };
      inner.importScripts = (...urls) => Promise.all(urls.map((each) => load(inner, each)));
      load(inner, url).then(() => {
        this.waiting.forEach((data) => this.deliver(data));
        this.waiting = null;
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    deliver(data) {
      const inner = this.frame.contentWindow;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };

  function load(inner, url) {
    return new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      inner.document.body.append(script);
    });
  }
}
